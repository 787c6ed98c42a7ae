"""Estimates with 95% intervals: t over seeds, exact binomial for shares, bootstrap over sequences; and Holm's
correction for many claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Contrast = Literal["value", "difference", "ratio"]
Values = Sequence[float] | Sequence[Sequence[float]]
"""One number a seed, or for each seed one number a sequence."""

SHARES = ("collapsed",)
"""Metrics that are 1 for a run of which something holds, else 0: their mean is a share of the runs."""
CONFIDENCE = 0.95
RESAMPLES = 10_000


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval, and how surprising any other value would be."""

    value: float
    low: float
    high: float
    """On the scale of the contrast; a ratio is a ratio, computed on its logarithm."""
    count: int
    """Seeds, or sequences."""
    _tails: Callable[[float], tuple[float, float]]
    """One-sided p-values if the truth were a threshold: that it is not above it, and not below it."""

    def p_above(self, threshold: float) -> float:
        """Two-sided p-value of the data if the truth were at most `threshold`; small: it is above."""
        return min(1.0, 2 * self._tails(threshold)[0])

    def p_below(self, threshold: float) -> float:
        """The same for at least `threshold`; small: it is below."""
        return min(1.0, 2 * self._tails(threshold)[1])

    def p_within(self, low: float, high: float) -> float:
        """The larger p-value of two one-sided tests; small: the truth lies between the bounds, or on one."""
        if self.low == self.high:
            return 0.0 if low <= self.value <= high else 1.0
        return max(self.p_above(low), self.p_below(high))


@dataclass(frozen=True)
class _Tails:
    """The p-values of a mean. They come from Student's t, or from the resamples: how many lie on the other side, with
    the estimate itself counted as one of them, so that no p-value is 0 (Davison and Hinkley 1997, "Bootstrap methods
    and their application", 4.2).
    """

    center: float
    error: float
    freedom: int
    resamples: tuple[float, ...] | None
    logarithm: bool

    def __call__(self, threshold: float) -> tuple[float, float]:
        if self.logarithm and threshold <= 0:
            return 0.0, 1.0
        at = math.log(threshold) if self.logarithm else threshold
        if self.resamples is not None:
            ordered, count = np.asarray(self.resamples), len(self.resamples)
            below = int(np.searchsorted(ordered, at, side="right"))
            above = count - int(np.searchsorted(ordered, at, side="left"))
            return (below + 1) / (count + 1), (above + 1) / (count + 1)
        if self.error == 0:  # every seed says the same
            not_above = 0.0 if self.center > at else 1.0 if self.center < at else 0.5
            return not_above, 1.0 - not_above
        t = (self.center - at) / self.error
        return float(stats.t.sf(t, self.freedom)), float(stats.t.cdf(t, self.freedom))


def estimate(arm: Values, against: Values | None, contrast: Contrast) -> Estimate:
    """The mean of an arm over seeds or sequences, or of its difference from or ratio to another, paired.

    One number a seed: a t interval over the seeds. Several: their means, resampled over sequences within each seed
    (10,000 resamples, percentile interval); the pairing is kept.

    Raises:
        ValueError: the arms are not paired, or a ratio is asked of numbers that are not above 0.
    """
    rows, others = _columns(arm), None if against is None else _columns(against)
    if contrast != "value" and (others is None or [len(r) for r in rows] != [len(o) for o in others]):
        raise ValueError("arms: found other seeds or sequences in one than in the other, expected the same in both")
    if all(len(row) == 1 for row in rows):
        return _over_seeds(np.concatenate(rows), None if others is None else np.concatenate(others), contrast)
    return _over_sequences(rows, others, contrast)


def estimate_share(arm: Values) -> Estimate:
    """The share of the runs that are 1, with its exact binomial interval (Clopper and Pearson 1934).

    0 of 5 runs have the interval 0 to 0.52: a t interval over five equal numbers would be a point.

    Raises:
        ValueError: a run is neither 0 nor 1.
    """
    runs = np.concatenate(_columns(arm)).tolist()
    if not set(runs) <= {0.0, 1.0}:
        raise ValueError(f"share: found {runs}, expected 0 or 1 for each run")
    count, hits = len(runs), int(sum(runs))
    interval = stats.binomtest(hits, count).proportion_ci(CONFIDENCE, method="exact")
    return Estimate(hits / count, float(interval.low), float(interval.high), count, _BinomialTails(hits, count))


@dataclass(frozen=True)
class _BinomialTails:
    """The p-values of a share of `count` runs."""

    hits: int
    count: int

    def __call__(self, threshold: float) -> tuple[float, float]:
        share = min(max(threshold, 0.0), 1.0)
        at_least = stats.binom.sf(self.hits - 1, self.count, share)
        return float(at_least), float(stats.binom.cdf(self.hits, self.count, share))


def mean(arm: Values) -> float:
    """The mean over seeds, of the means over sequences: the value of `estimate` without its interval."""
    return _mean(np.array([column.mean() for column in _columns(arm)]))


def _mean(numbers: NDArray[np.float64]) -> float:
    """Without the rounding of a mean where all numbers are one."""
    return float(numbers[0] if (numbers == numbers[0]).all() else numbers.mean())


def _columns(values: Values) -> list[NDArray[np.float64]]:
    return [np.atleast_1d(np.asarray(value, dtype=np.float64)) for value in values]


def _contrast(arm: NDArray[np.float64], against: NDArray[np.float64] | None, contrast: Contrast) -> NDArray[np.float64]:
    if contrast == "value" or against is None:
        return arm
    if contrast == "difference":
        return arm - against
    if not (arm > 0).all() or not (against > 0).all():
        raise ValueError(f"ratio: found {arm.tolist()} over {against.tolist()}, expected numbers above 0")
    return np.log(arm) - np.log(against)


def _over_seeds(arm: NDArray[np.float64], against: NDArray[np.float64] | None, contrast: Contrast) -> Estimate:
    numbers = _contrast(arm, against, contrast)
    center, count = _mean(numbers), len(numbers)
    if count == 1 and contrast != "value":
        raise ValueError("seeds: found 1, expected at least 2 for an interval")
    alike = (numbers == numbers[0]).all()
    error = 0.0 if alike else float(numbers.std(ddof=1)) / math.sqrt(count)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error if error else 0.0
    tails = _Tails(center, error, count - 1, None, contrast == "ratio")
    return Estimate(*_scaled((center, center - reach, center + reach), contrast), count, tails)


def _over_sequences(
    rows: list[NDArray[np.float64]], others: list[NDArray[np.float64]] | None, contrast: Contrast
) -> Estimate:
    generator = np.random.default_rng(0)

    def means(columns: list[NDArray[np.float64]], picks: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        return np.mean([column[pick].mean(-1) for column, pick in zip(columns, picks, strict=True)], axis=0)

    picks = [generator.integers(len(row), size=(RESAMPLES, len(row))) for row in rows]
    whole = [np.arange(len(row))[None] for row in rows]
    center = _contrast(means(rows, whole), None if others is None else means(others, whole), contrast)[0]
    resampled = _contrast(means(rows, picks), None if others is None else means(others, picks), contrast)
    resampled.sort()
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    tails = _Tails(float(center), 1.0, 0, tuple(resampled.tolist()), contrast == "ratio")
    bounds = _scaled((float(center), float(low), float(high)), contrast)
    return Estimate(*bounds, sum(len(row) for row in rows), tails)


def _scaled(bounds: tuple[float, float, float], contrast: Contrast) -> tuple[float, float, float]:
    if contrast != "ratio":
        return bounds
    value, low, high = bounds
    return math.exp(value), math.exp(low), math.exp(high)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values corrected for there being several (Holm 1979): none is below what it was, and the order stays."""
    ordered = sorted(p_values, key=lambda name: p_values[name])
    corrected: dict[str, float] = {}
    floor = 0.0
    for rank, name in enumerate(ordered):
        floor = max(floor, min(1.0, (len(ordered) - rank) * p_values[name]))
        corrected[name] = floor
    return {name: corrected[name] for name in p_values}
