import math

import pytest
import torch

from fp8rl.rl.mismatch import agreement

LN2 = math.log(2.0)


def of_rows(*rows: list[float], mask: list[list[int]] | None = None) -> dict[str, float]:
    """Agreement of rows of differences, over rollout logprobs of 0; shorter rows are masked at their end."""
    width = max(map(len, rows))
    d = torch.tensor([row + [math.nan] * (width - len(row)) for row in rows], dtype=torch.float64)
    chosen = (
        torch.tensor([[t < len(row) for t in range(width)] for row in rows]) if mask is None else torch.tensor(mask)
    )
    return agreement(d, torch.zeros_like(d), chosen.bool())


def test_two_sequences_by_hand() -> None:
    # Sums of d: 3 ln 2 over 3 tokens, -2 ln 2 over one: means ln 2 and -2 ln 2, geometric ratios 2 and 1/4.
    # Perplexity ratios 1/2 and 4. chi^2: (2^6 + 2^-4) / 2 - 1. ESS: weights 8 and 1/4: 8.25^2 / (2 * 64.0625).
    metrics = of_rows([LN2, 3 * LN2, -LN2], [-2 * LN2])
    expected = {
        "mismatch/sequences": 2,
        "mismatch/geometric_ratio_mean": 1.125,
        "mismatch/geometric_ratio_p50": 0.25,
        "mismatch/geometric_ratio_p99": 2.0,
        "mismatch/geometric_ratio_max": 2.0,
        "mismatch/ppl_ratio_mean": 2.25,
        "mismatch/ppl_ratio_p50": 0.5,
        "mismatch/ppl_ratio_max": 4.0,
        "mismatch/chi2_sequence": 31.03125,
        "mismatch/ess_sequence": 68.0625 / 128.125,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_a_sequence_counts_its_finite_tokens_only() -> None:
    # The mean of the first row is that of its two finite tokens, and a row without any is no sequence.
    metrics = of_rows([LN2, math.nan, 3 * LN2], [math.inf], [])
    assert (metrics["mismatch/sequences"], metrics["mismatch/nonfinite_sequences"]) == (1, 2)
    assert metrics["mismatch/geometric_ratio_mean"] == pytest.approx(4.0)
    assert metrics["mismatch/chi2_sequence"] == pytest.approx(2.0**8 - 1)


def test_length_decides_nothing_in_a_mean_over_sequences() -> None:
    metrics = of_rows([LN2] * 50, [-LN2])
    assert metrics["mismatch/geometric_ratio_mean"] == pytest.approx(1.25)


def test_long_sequences_do_not_overflow() -> None:
    # Sums of ±3000 are cut to exponents of ±20, of e^(2 sum) too; the means, ±3, are not.
    metrics = of_rows([3.0] * 1000, [-3.0] * 1000)
    assert metrics["mismatch/chi2_sequence"] == pytest.approx((math.exp(20) + math.exp(-20)) / 2 - 1)
    assert metrics["mismatch/ess_sequence"] == pytest.approx(0.5)
    assert metrics["mismatch/geometric_ratio_max"] == pytest.approx(math.exp(3))
    assert metrics["mismatch/ppl_ratio_max"] == pytest.approx(math.exp(3))


def test_opposite_errors_cancel_in_a_sequence_but_not_in_its_tokens() -> None:
    metrics = of_rows([1.0, -1.0])
    assert metrics["mismatch/geometric_ratio_mean"] == metrics["mismatch/ess_sequence"] == 1.0
    assert metrics["mismatch/chi2_sequence"] == 0.0
    assert metrics["mismatch/chi2_token"] > 2 and metrics["mismatch/ess"] < 0.7
