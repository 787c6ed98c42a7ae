"""What the field claims, as data, and what measurements say of it.

A claim names a metric, two arms, a direction and a margin before anything is measured; its digest goes with every
result, so that a claim that was changed afterwards shows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypedDict, Unpack

from lab.studies.harness.statistics import Contrast, Estimate, Values, estimate, holm

Rule = Literal["above", "below", "within"]
Control = Literal["negative", "positive"]
Verdict = Literal["confirmed", "contradicted", "equivalent", "undecided", "withheld"]
Measured = Mapping[str, Mapping[str, Values]]
"""Values by arm, then by metric."""

SIGNIFICANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence that numbers can hold against.

    Attributes:
        id: of the seed documents, e.g. `003-16`, with a letter where one sentence makes several claims; of a control a
            name.
        says: the sentence, as it was claimed.
        metric, arm, against: what is compared: the arm's metric, its difference from another arm's or its ratio to it.
        rule: `above` or `below` the first number of `bounds`; `within` the two.
        margin: differences from that number that make none in practice.
        control: `negative`: nothing may be found here. `positive`: harm that must be found.
    """

    id: str
    says: str
    metric: str
    arm: str
    against: str | None = None
    contrast: Contrast = "value"
    rule: Rule
    bounds: tuple[float, ...]
    margin: float = 0.0
    control: Control | None = None

    def __post_init__(self) -> None:
        if (self.against is None) != (self.contrast == "value"):
            raise ValueError(f"{self.id}: found contrast={self.contrast} with against={self.against}")
        if len(self.bounds) != (2 if self.rule == "within" else 1):
            raise ValueError(f"{self.id}: found bounds={self.bounds}, expected {self.rule}'s")


class Settings(TypedDict, total=False):
    """What only some claims have; see Claim."""

    margin: float
    control: Control | None


def value(id: str, says: str, metric: str, arm: str, rule: Rule, *bounds: float, **more: Unpack[Settings]) -> Claim:
    """A claim about an arm alone."""
    return Claim(id=id, says=says, metric=metric, arm=arm, rule=rule, bounds=bounds, **more)


def difference(
    id: str, says: str, metric: str, arm: str, against: str, rule: Rule, *bounds: float, **more: Unpack[Settings]
) -> Claim:
    """A claim about how much an arm has above another."""
    return replace(value(id, says, metric, arm, rule, *bounds, **more), against=against, contrast="difference")


def ratio(
    id: str, says: str, metric: str, arm: str, against: str, rule: Rule, *bounds: float, **more: Unpack[Settings]
) -> Claim:
    """A claim about how many times another arm's an arm's is."""
    return replace(value(id, says, metric, arm, rule, *bounds, **more), against=against, contrast="ratio")


def twice(says: str, metric: str, arm: str, against: str | None = None, id: str = "same arm twice") -> Claim:
    """The negative control: the same arm once more, which differs in nothing; against: the arm that it repeats, where
    its metric is not a difference already."""
    bounds: tuple[Rule, float, float] = ("within", 0.0, 0.0)
    if against is None:
        return value(id, says, metric, arm, *bounds, control="negative")
    return difference(id, says, metric, arm, against, *bounds, control="negative")


@dataclass(frozen=True)
class Judged:
    """A claim and what was found.

    Attributes:
        p: of the verdict, corrected for the other claims of the study.
        visible: of an undecided claim, the smallest effect that these data could have shown: half the interval.
        why: of a withheld verdict, and of a positive control that may stay undecided.
    """

    claim: Claim
    found: Estimate
    verdict: Verdict
    p: float
    visible: float | None = None
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        found = {"value": self.found.value, "low": self.found.low, "high": self.found.high, "count": self.found.count}
        return {
            "id": self.claim.id,
            "says": self.claim.says,
            "metric": self.claim.metric,
            "arm": self.claim.arm,
            "against": self.claim.against,
            "contrast": self.claim.contrast,
            "rule": self.claim.rule,
            "bounds": list(self.claim.bounds),
            "margin": self.claim.margin,
            "control": self.claim.control,
            "found": found,
            "verdict": self.verdict,
            "p": self.p,
            "visible": self.visible,
            "why": self.why,
        }


def digest(claims: Sequence[Claim]) -> str:
    """16 hex digits of the SHA-256 over the claims."""
    canonical = json.dumps([asdict(claim) for claim in claims], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def judge(claims: Sequence[Claim], measured: Measured, *, full: bool) -> list[Judged]:
    """What the measurements say of each claim.

    Verdicts need a full run and controls that hold: the negative one finds nothing, the positive one finds its harm.
    A quick run may leave arms out, and their claims with them, and be too short for the positive one. The p-values of a
    study's claims are corrected together (Holm); a control stands for itself.
    """
    if not full:
        claims = [claim for claim in claims if is_measured(claim, measured)]
    found = {claim.id: _found(claim, measured) for claim in claims}
    if len(found) != len(claims):
        raise ValueError(f"claims: found {[claim.id for claim in claims]}, expected a different id for each")
    leaning = {claim.id: _leaning(claim, found[claim.id]) for claim in claims}
    corrected = holm({claim.id: leaning[claim.id][1] for claim in claims if not claim.control})
    controls = [_control(claim, found[claim.id], leaning[claim.id], full) for claim in claims if claim.control]
    broken = [control.claim.id for control in controls if control.verdict != "confirmed"]
    why = "a quick run" if not full else f"controls that do not hold: {', '.join(broken)}" if broken else ""
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
    """Whether its arms and metric are among the measurements."""
    return all(claim.metric in measured.get(arm, {}) for arm in (claim.arm, claim.against) if arm is not None)


def _control(claim: Claim, found: Estimate, leaning: tuple[Verdict, float], full: bool) -> Judged:
    verdict, p = _decided(leaning, leaning[1])
    may_wait = not full and claim.control == "positive" and verdict == "undecided"
    return Judged(claim, found, verdict, p, why="a quick run" if may_wait else "")


def _found(claim: Claim, measured: Measured) -> Estimate:
    arm = measured[claim.arm][claim.metric]
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
