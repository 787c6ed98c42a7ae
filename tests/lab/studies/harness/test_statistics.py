"""Estimates against scipy's own tests, by hand, and under resampling."""

import math

import numpy as np
import pytest
from scipy import stats

from lab.studies.harness.statistics import estimate, estimate_share, holm

SEEDS = [0.91, 1.02, 0.98, 1.07, 0.95]
OTHERS = [0.80, 0.93, 0.90, 0.95, 0.89]


def test_over_seeds_it_is_students_t_and_a_difference_is_paired() -> None:
    found = estimate(SEEDS, None, "value")
    theirs = stats.ttest_1samp(SEEDS, 0.9).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(theirs.low), pytest.approx(theirs.high))
    assert found.p_above(0.9) == pytest.approx(stats.ttest_1samp(SEEDS, 0.9).pvalue)
    assert found.p_below(1.2) == pytest.approx(stats.ttest_1samp(SEEDS, 1.2).pvalue)
    paired = estimate(SEEDS, OTHERS, "difference")
    assert paired.p_above(0.0) == pytest.approx(stats.ttest_rel(SEEDS, OTHERS).pvalue)
    assert estimate(SEEDS, OTHERS[::-1], "difference").high > paired.high, "another pairing says less"


def test_a_ratio_is_taken_on_logarithms() -> None:
    found = estimate([2.0, 8.0, 4.0], [1.0, 2.0, 2.0], "ratio")
    assert found.value == pytest.approx((2 * 4 * 2) ** (1 / 3))
    assert estimate([1.0, 2.0, 2.0], [2.0, 8.0, 4.0], "ratio").low == pytest.approx(1 / found.high)
    with pytest.raises(ValueError, match="expected numbers above 0"):
        estimate([1.0, 0.0, 1.0], [1.0, 1.0, 1.0], "ratio")
    with pytest.raises(ValueError, match="found other seeds or sequences"):
        estimate([[1.0, 2.0], [3.0]], [[1.0], [2.0, 3.0]], "difference")


def test_equal_seeds_give_a_point() -> None:
    found = estimate([0.1] * 5, None, "value")
    assert found.low == found.value == found.high == 0.1
    assert found.p_within(0.1, 0.1) == 0.0 and found.p_within(0.2, 0.3) == 1.0
    assert found.p_above(0.05) == 0.0 and found.p_above(0.15) == 1.0 and found.p_above(0.1) == 1.0


def test_a_share_has_an_exact_binomial_interval() -> None:
    none, three = estimate_share([0.0] * 5), estimate_share([1.0, 0.0, 1.0, 1.0, 0.0])
    assert (none.value, none.low, none.high) == (0.0, 0.0, pytest.approx(1 - 0.025**0.2))
    assert none.p_below(0.1) == 1.0 and none.p_within(0.0, 0.0) == 1.0, "0.9^5: none of five is no wonder"
    assert none.p_below(0.6) == pytest.approx(2 * 0.4**5)
    assert three.value == 0.6 and three.p_above(0.1) == pytest.approx(
        2 * (10 * 0.1**3 * 0.9**2 + 5 * 0.1**4 * 0.9 + 1e-5)
    )
    with pytest.raises(ValueError, match="expected 0 or 1"):
        estimate_share([0.5])


@pytest.mark.slow
def test_over_sequences_it_resamples_within_each_seed() -> None:
    rng = np.random.default_rng(3)
    rows = [rng.normal(size=400).tolist() for _ in range(3)]
    found = estimate(rows, None, "value")
    by_theory = 1.96 / math.sqrt(1200)
    assert found.high - found.low == pytest.approx(2 * by_theory, rel=0.1) and found.count == 1200
    assert estimate(rows, None, "value") == found, "the resamples are the same each time"
    assert found.p_above(-9.0) == found.p_below(9.0) == 2 / 10_001, "no resample beyond it is no certainty"
    assert found.p_above(9.0) == found.p_below(-9.0) == 1.0
    paired = estimate([[x + 0.01 for x in row] for row in rows], rows, "difference")
    assert paired.low == pytest.approx(0.01) and paired.high == pytest.approx(0.01)


def test_holm_by_hand() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == {"a": pytest.approx(0.03), "b": 0.06, "c": 0.06}
