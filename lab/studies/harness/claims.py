"""Claims of the field, as data, and what measurements say of them.

A claim names a metric, two arms, a direction and a margin before anything is measured; its digest goes with every
result, so that a claim that was changed afterwards shows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from lab.studies.harness.statistics import SHARES, Contrast, Estimate, Values, estimate, estimate_share, holm

Rule = Literal["above", "below", "within"]
Control = Literal["negative", "positive"]
Verdict = Literal["confirmed", "contradicted", "equivalent", "undecided", "withheld"]
Measured = Mapping[str, Mapping[str, Values]]
"""Values by arm, then by metric."""

SIGNIFICANCE = 0.05
TABLE = Path(__file__).parents[1] / "claims.yaml"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence that numbers can hold against."""

    id: str
    """A seed document's, `003-16`, with a letter where one sentence makes several claims; or a control's name."""
    says: str
    """The sentence, as it was claimed."""
    metric: str
    arm: str
    against: str | None = None
    """The arm from which the metric's difference is taken, or to which its ratio."""
    contrast: Contrast = "value"
    rule: Rule
    """`above` or `below` the first number of `bounds`; `within` the two."""
    bounds: tuple[float, ...]
    margin: float = 0.0
    """Differences from the bound that make none in practice."""
    control: Control | None = None
    """`negative`: nothing may be found here. `positive`: harm that must be found."""

    def __post_init__(self) -> None:
        if (self.against is None) != (self.contrast == "value"):
            raise ValueError(f"{self.id}: found contrast={self.contrast} with against={self.against}")
        if len(self.bounds) != (2 if self.rule == "within" else 1):
            raise ValueError(f"{self.id}: found bounds={self.bounds}, expected {self.rule}'s")


def claims_of(study: str) -> tuple[Claim, ...]:
    """The claims of a study, as `claims.yaml` lists them."""
    return tuple(Claim(**row | {"bounds": tuple(row["bounds"])}) for row in _table()[study])


@cache
def _table() -> dict[str, list[dict[str, Any]]]:
    table: dict[str, list[dict[str, Any]]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return table


@dataclass(frozen=True)
class Judged:
    """A claim and what was found."""

    claim: Claim
    found: Estimate
    verdict: Verdict
    p: float
    """Of the verdict, corrected for the other claims of the study."""
    visible: float | None = None
    """Of an undecided claim, the smallest effect that these data could have shown: half the interval."""
    why: str = ""
    """Of a withheld verdict, and of a positive control that may stay undecided."""

    def to_dict(self) -> dict[str, Any]:
        found = {"value": self.found.value, "low": self.found.low, "high": self.found.high, "count": self.found.count}
        verdict = {"verdict": self.verdict, "p": self.p, "visible": self.visible, "why": self.why}
        return {**asdict(self.claim), "bounds": list(self.claim.bounds), "found": found, **verdict}


def digest(claims: Sequence[Claim]) -> str:
    """16 hex digits of the SHA-256 over the claims."""
    canonical = json.dumps([asdict(claim) for claim in claims], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def judge(claims: Sequence[Claim], measured: Measured, *, full: bool, missing: Sequence[str] = ()) -> list[Judged]:
    """Judge each claim by the measurements.

    Verdicts need a full run and controls that hold: the negative one finds nothing, the positive one finds its harm.
    A quick run may leave arms out, and their claims with them, and be too short for the positive one; arms may be
    missing for now. The p-values of a study's claims are corrected together (Holm); a control stands for itself.
    """
    if not full or missing:
        claims = [claim for claim in claims if is_measured(claim, measured)]
    found = {claim.id: _found(claim, measured) for claim in claims}
    if len(found) != len(claims):
        raise ValueError(f"claims: found {[claim.id for claim in claims]}, expected a different id for each")
    leaning = {claim.id: _leaning(claim, found[claim.id]) for claim in claims}
    corrected = holm({claim.id: leaning[claim.id][1] for claim in claims if not claim.control})
    early = "a quick run" if not full else f"{len(missing)} arms are missing" if missing else ""
    controls = [_control(claim, found[claim.id], leaning[claim.id], early) for claim in claims if claim.control]
    broken = [control.claim.id for control in controls if control.verdict != "confirmed"]
    why = early or (f"controls that do not hold: {', '.join(broken)}" if broken else "")
    judged = {control.claim.id: control for control in controls}
    for claim in claims:
        if claim.control:
            continue
        estimated, p = found[claim.id], corrected[claim.id]
        verdict, p = _decided(leaning[claim.id], p)
        visible = (estimated.high - estimated.low) / 2 if verdict == "undecided" else None
        judged[claim.id] = Judged(claim, estimated, "withheld" if why else verdict, p, None if why else visible, why)
    return [judged[claim.id] for claim in claims]


def is_measured(claim: Claim, measured: Measured) -> bool:
    """Say whether the claim's arms and metric are among the measurements."""
    return all(claim.metric in measured.get(arm, {}) for arm in (claim.arm, claim.against) if arm is not None)


def _control(claim: Claim, found: Estimate, leaning: tuple[Verdict, float], early: str) -> Judged:
    """early: why there are no verdicts yet, if so; a positive control may be undecided then."""
    verdict, p = _decided(leaning, leaning[1])
    may_wait = claim.control == "positive" and verdict == "undecided"
    return Judged(claim, found, verdict, p, why=early if may_wait else "")


def _found(claim: Claim, measured: Measured) -> Estimate:
    arm = measured[claim.arm][claim.metric]
    if claim.metric in SHARES and claim.contrast == "value":
        return estimate_share(arm)
    against = None if claim.against is None else measured[claim.against][claim.metric]
    return estimate(arm, against, claim.contrast)


def _leaning(claim: Claim, found: Estimate) -> tuple[Verdict, float]:
    """The verdict that the data speak for most, and its p-value."""
    first = claim.bounds[0]
    if claim.rule == "within":
        low, high = first - claim.margin, claim.bounds[1] + claim.margin
        inside = found.p_within(low, high)
        outside = min(found.p_above(high), found.p_below(low))
        return ("confirmed", inside) if inside <= outside else ("contradicted", outside)
    above, below = found.p_above(first), found.p_below(first)
    for_it, against_it = (above, below) if claim.rule == "above" else (below, above)
    low, high = _around(first, claim)
    equivalent = found.p_within(low, high) if claim.margin else 1.0
    if equivalent <= SIGNIFICANCE:
        return "equivalent", equivalent
    return ("confirmed", for_it) if for_it <= against_it else ("contradicted", against_it)


def _around(threshold: float, claim: Claim) -> tuple[float, float]:
    if claim.contrast == "ratio":
        return threshold / (1 + claim.margin), threshold * (1 + claim.margin)
    return threshold - claim.margin, threshold + claim.margin


def _decided(leaning: tuple[Verdict, float], p: float) -> tuple[Verdict, float]:
    return (leaning[0] if p <= SIGNIFICANCE else "undecided"), p
