"""A study: a question, claims that are fixed before it is measured, a measurement, and pictures of it; and all studies
by name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fp8rl.numerics.core.errors import user_error
from lab.studies.harness.claims import Claim, Measured
from lab.studies.harness.lab import Lab
from lab.studies.harness.statistics import SHARES, estimate, estimate_share, mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST_SEEDS = 3


Band = tuple[float, float, float]
"""A value and the ends of its interval."""


def with_interval(band: Band, form: str) -> str:
    """A value and its interval; form: of each number, as `+.5f`."""
    value, low, high = (format(number, form) for number in band)
    return f"{value} ({low} to {high})"


def by_arm(found: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Values by arm and metric, of one mapping by arm and metric for each seed."""
    return {arm: {metric: [one[arm][metric] for one in found] for metric in found[0][arm]} for arm in found[0]}


@dataclass(frozen=True)
class Measurement:
    """Everything that a study found."""

    values: Measured
    """By arm, then metric: a number for each seed, or for each seed one for each sequence."""
    subject: str
    """What was measured on, for the figures: model, parameters, steps."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """More for tables and figures, as JSON values."""
    missing: Sequence[str] = ()
    """Arms of claims that are not measured yet, of a study that goes on over days; there are no verdicts before."""

    def mean(self, arm: str, metric: str) -> float:
        """An arm's metric over all seeds and sequences."""
        return mean(self.values[arm][metric])

    def of(self, arm: str, metric: str, against: str | None = None) -> Band:
        """An arm's metric, or its difference from another's: the mean and its 95% interval."""
        mine = self.values[arm][metric]
        if against is None:
            found = estimate_share(mine) if metric in SHARES else estimate(mine, None, "value")
        else:
            found = estimate(mine, self.values[against][metric], "difference")
        return found.value, found.low, found.high


@dataclass(frozen=True)
class TextTable:
    """A table of the study's page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Study:
    """One file of `studies`."""

    name: str
    """Of the file, and of the command's argument."""
    question: str
    seeds: int = FEWEST_SEEDS
    """Of a full run, at least; 5 where arms are trained."""
    claims: Sequence[Claim]
    """With a negative and a positive control among them."""
    measure: Callable[[Lab], Measurement]
    """Runs the arms."""
    draw: Callable[[Measurement], Mapping[str, Figure]]
    """Figures by file name, without suffix."""
    tables: Callable[[Measurement], Sequence[TextTable]]
    """What was measured, in numbers."""
    units: Mapping[str, str] = field(default_factory=dict)
    """Of metrics, by the part of their name before a slash; a metric that is a plain number has none."""
    check: Callable[[], None] | None = None
    """Refuses a full run with a UserError, before anything runs, where something that it needs is not there."""

    def __post_init__(self) -> None:
        if self.seeds < FEWEST_SEEDS:
            raise ValueError(f"{self.name}: found seeds={self.seeds}, expected at least {FEWEST_SEEDS}")
        for control in ("negative", "positive"):
            if not any(claim.control == control for claim in self.claims):
                raise ValueError(f"{self.name}: found no {control} control, expected one among the claims")


NAMES = (
    "precision_cases",
    "gradient_direction",
    "gemm_error",
    "gemm_trace",
    "scale_formats",
    "failure_modes",
    "model_scale",
    "wire_formats",
    "bf16",
    "adapters",
    "pretrained",
    "benefit",
    "drift",
)
"""The studies' names, in the order in which they run."""


def load(name: str) -> Study:
    """The study of a name.

    Raises:
        UserError: there is none.
    """
    if name not in NAMES:
        nearest = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)[0]
        remedy = f"Did you mean {nearest}? Correct it, or say --all."
        raise user_error("study", found=name, expected=f"one of {', '.join(NAMES)}", remedy=remedy)
    found: Study = importlib.import_module(f"lab.studies.{name}").STUDY
    return found
