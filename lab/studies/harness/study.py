"""What a study is: a question, claims that are fixed before it is measured, a measurement, and pictures of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lab.studies.harness.claims import Claim, Measured
from lab.studies.harness.lab import Lab
from lab.studies.harness.statistics import estimate, mean

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
    """What a study found.

    Attributes:
        values: by arm, then metric: a number for each seed, or for each seed one for each sequence.
        subject: what was measured on, for the figures: model, parameters, steps.
        details: more for tables and figures, as JSON values.
    """

    values: Measured
    subject: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def mean(self, arm: str, metric: str) -> float:
        """An arm's metric over all seeds and sequences."""
        return mean(self.values[arm][metric])

    def of(self, arm: str, metric: str, against: str | None = None) -> Band:
        """An arm's metric, or its difference from another's: the mean and its 95% interval."""
        other = None if against is None else self.values[against][metric]
        found = estimate(self.values[arm][metric], other, "value" if other is None else "difference")
        return found.value, found.low, found.high


@dataclass(frozen=True)
class TextTable:
    """A table of the study's page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Study:
    """One file of `studies`.

    Attributes:
        name: of the file, and of the command's argument.
        question: in a sentence.
        seeds: of a full run, at least; 5 where arms are trained.
        claims: with a negative and a positive control among them.
        measure: runs the arms.
        draw: figures by file name, without suffix.
        tables: what was measured, in numbers.
        units: of metrics, by the part of their name before a slash; a metric that is a plain number has none.
    """

    name: str
    question: str
    seeds: int = FEWEST_SEEDS
    claims: Sequence[Claim]
    measure: Callable[[Lab], Measurement]
    draw: Callable[[Measurement], Mapping[str, Figure]]
    tables: Callable[[Measurement], Sequence[TextTable]]
    units: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seeds < FEWEST_SEEDS:
            raise ValueError(f"{self.name}: found seeds={self.seeds}, expected at least {FEWEST_SEEDS}")
        for control in ("negative", "positive"):
            if not any(claim.control == control for claim in self.claims):
                raise ValueError(f"{self.name}: found no {control} control, expected one among the claims")
