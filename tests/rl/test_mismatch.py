import math

import numpy as np
import pytest
import torch

from rl.metrics import METRICS
from rl.mismatch import agreement, row_abs_diff_means

LN2 = math.log(2.0)
PREFIX = "mismatch/train_rollout_logprob_abs_diff"


def from_differences(differences: list[float], **options: float) -> dict[str, float]:
    """Agreement of one row whose trainer logprobs are the rollout's plus these differences, exactly (rollout 0)."""
    d = torch.tensor([differences], dtype=torch.float64)
    return agreement(d, torch.zeros_like(d), torch.ones_like(d, dtype=torch.bool), **options)


def test_equal_logprobs() -> None:
    logprobs = torch.tensor([[0.0, -1.5, -0.1], [0.0, -3.25, -7.0]])
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]], dtype=torch.bool)
    metrics = agreement(logprobs, logprobs.clone(), mask)
    assert metrics == {
        f"{PREFIX}_mean": 0.0,
        f"{PREFIX}_p99": 0.0,
        f"{PREFIX}_max": 0.0,
        "mismatch/tis_clipfrac": 0.0,
        "mismatch/tis_clipfrac_two_sided": 0.0,
        "mismatch/k1_kl": 0.0,
        "mismatch/k3_kl": 0.0,
        "mismatch/exact_frac": 1.0,
        "mismatch/nonfinite_count": 0.0,
        "mismatch/tokens": 3.0,
    }


def test_by_hand() -> None:
    # d = 0, ln 2, -2 ln 2, 3 ln 2: rho = 1, 2, 1/4, 8. abs d sums to 6 ln 2 = 4.158883, mean 1.039721.
    # rho > 2 once (8); rho < 1/2 once more (1/4); rho = 2 itself is inside.
    # -mean d = -(0 + 1 - 2 + 3) ln 2 / 4 = -0.346574. mean(rho - 1 - d) = (11.25 - 4 - 1.386294) / 4 = 1.465926.
    metrics = from_differences([0.0, LN2, -2 * LN2, 3 * LN2])
    assert metrics[f"{PREFIX}_mean"] == pytest.approx(1.0397208, abs=1e-7)
    assert metrics[f"{PREFIX}_max"] == pytest.approx(2.0794415, abs=1e-7)
    assert metrics[f"{PREFIX}_p99"] == pytest.approx(2.0794415, abs=1e-7)
    assert metrics["mismatch/tis_clipfrac"] == 0.25
    assert metrics["mismatch/tis_clipfrac_two_sided"] == 0.5
    assert metrics["mismatch/k1_kl"] == pytest.approx(-0.3465736, abs=1e-7)
    assert metrics["mismatch/k3_kl"] == pytest.approx(1.4659264, abs=1e-7)
    assert metrics["mismatch/exact_frac"] == 0.25
    assert metrics["mismatch/tokens"] == 4


def test_the_cap_moves_both_clip_fractions() -> None:
    # rho = 1.5, 1/1.5, 3, 1/3 with C = 1.2: all four outside, two above.
    differences = [math.log(1.5), -math.log(1.5), math.log(3), -math.log(3)]
    metrics = from_differences(differences, tis_cap=1.2)
    assert (metrics["mismatch/tis_clipfrac"], metrics["mismatch/tis_clipfrac_two_sided"]) == (0.5, 1.0)
    metrics = from_differences(differences, tis_cap=5.0)
    assert (metrics["mismatch/tis_clipfrac"], metrics["mismatch/tis_clipfrac_two_sided"]) == (0.0, 0.0)


def test_a_ratio_that_only_falls_is_seen_by_the_two_sided_fraction_alone() -> None:
    metrics = from_differences([-2.0, -3.0, -0.01])
    assert metrics["mismatch/tis_clipfrac"] == 0.0
    assert metrics["mismatch/tis_clipfrac_two_sided"] == pytest.approx(2 / 3)


def test_the_percentile_is_a_value_that_occurs() -> None:
    # 200 differences 0.001 ... 0.200: rank ceil(0.99 * 200) = 198, so 0.198.
    metrics = from_differences([i / 1000 for i in range(200, 0, -1)])
    assert metrics[f"{PREFIX}_p99"] == 0.198


def test_the_smallest_difference_is_not_exact() -> None:
    rollout = torch.tensor([[-1.0, -1.0]])
    train = torch.nextafter(rollout, torch.zeros(1))
    train[0, 0] = -1.0
    metrics = agreement(train, rollout, torch.ones(1, 2, dtype=torch.bool))
    assert metrics["mismatch/exact_frac"] == 0.5
    assert metrics[f"{PREFIX}_max"] == 2.0**-24


def test_nonfinite_values_are_dropped_and_counted() -> None:
    train = torch.tensor([[-1.0, -1.0, math.nan, -1.0, -math.inf, -2.0]])
    rollout = torch.tensor([[math.nan, -math.inf, -1.0, -1.0, -math.inf, math.nan]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]], dtype=torch.bool)
    metrics = agreement(train, rollout, mask)
    assert metrics["mismatch/nonfinite_count"] == 4
    assert metrics["mismatch/tokens"] == 1
    assert metrics["mismatch/exact_frac"] == 1.0
    assert all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize("mask", [[0, 0], [1, 1]])
def test_without_a_finite_token_only_the_counts_remain(mask: list[int]) -> None:
    logprobs = torch.full((1, 2), math.nan)
    metrics = agreement(logprobs, logprobs, torch.tensor([mask], dtype=torch.bool))
    assert metrics == {"mismatch/tokens": 0.0, "mismatch/nonfinite_count": float(sum(mask))}


@pytest.mark.parametrize("size", [-1e30, -1000.0, 1000.0, 1e30])
def test_huge_differences_stay_finite(size: float) -> None:
    metrics = from_differences([size, 0.0])
    assert all(map(math.isfinite, metrics.values()))
    assert metrics[f"{PREFIX}_max"] == abs(size)


def test_against_an_independent_float64_oracle() -> None:
    generator = np.random.default_rng(3)
    rollout = (-generator.exponential(1.0, (40, 37))).astype(np.float32)
    noise = generator.normal(0, 0.5, (40, 37)) * (generator.random((40, 37)) < 0.7)
    train = (rollout + noise).astype(np.float32)
    mask = generator.random((40, 37)) < 0.6
    rollout[3, 5] = np.nan
    mask[3, 5] = True

    metrics = agreement(torch.from_numpy(train), torch.from_numpy(rollout), torch.from_numpy(mask), tis_cap=1.5)

    kept = mask & np.isfinite(rollout)
    d = train.astype(np.float64)[kept] - rollout.astype(np.float64)[kept]
    rho = np.exp(d)
    expected = {
        f"{PREFIX}_mean": np.abs(d).mean(),
        f"{PREFIX}_p99": np.quantile(np.abs(d), 0.99, method="inverted_cdf"),
        f"{PREFIX}_max": np.abs(d).max(),
        "mismatch/tis_clipfrac": np.mean(np.clip(rho, 0, 1.5) != rho),
        "mismatch/tis_clipfrac_two_sided": np.mean(np.clip(rho, 1 / 1.5, 1.5) != rho),
        "mismatch/k1_kl": np.mean(-d),
        "mismatch/k3_kl": np.mean(rho - 1 - d),
        "mismatch/exact_frac": np.mean(d == 0),
        "mismatch/nonfinite_count": 1.0,
        "mismatch/tokens": kept.sum(),
    }
    assert metrics == pytest.approx(expected, rel=1e-12)
    assert 0.0 < metrics["mismatch/exact_frac"] < 1.0


def test_both_kl_estimates_converge_to_the_divergence() -> None:
    # Tokens drawn from the rollout distribution p; the trainer's is q. KL(p || q) in closed form.
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    divergence = float((p * np.log(p / q)).sum())
    counts = (p * 1000).astype(int)  # the exact expectation, each token as often as it is likely
    tokens = np.repeat(np.arange(3), counts)
    train, rollout = torch.tensor(np.log(q[tokens]))[None], torch.tensor(np.log(p[tokens]))[None]
    metrics = agreement(train, rollout, torch.ones(1, len(tokens), dtype=torch.bool))
    assert metrics["mismatch/k1_kl"] == pytest.approx(divergence, rel=1e-9)
    assert metrics["mismatch/k3_kl"] == pytest.approx(divergence, rel=1e-9)


def test_k3_keeps_its_digits_near_zero() -> None:
    # rho - 1 - d is d^2 / 2 here, 5e-17; computed naively it would be lost in the rounding of rho.
    assert from_differences([1e-8])["mismatch/k3_kl"] == pytest.approx(5e-17, rel=1e-4, abs=0.0)


def test_every_metric_is_declared() -> None:
    assert set(from_differences([0.1, 0.2])) <= set(METRICS)


def test_row_means_skip_masked_and_nonfinite_tokens() -> None:
    train = torch.tensor([[-9.0, -1.0, -2.0], [-9.0, math.nan, -1.0], [-9.0, -9.0, -9.0]])
    rollout = torch.tensor([[0.0, -1.5, -1.0], [0.0, -1.0, -1.25], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 0, 0]], dtype=torch.bool)
    assert row_abs_diff_means(train, rollout, mask) == [0.75, 0.25, None]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="expected equal ones"):
        agreement(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="tis_cap"):
        from_differences([0.1], tis_cap=0.5)
