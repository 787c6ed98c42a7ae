import math

import numpy as np
import pytest
import torch

from fp8rl.rl.mismatch.logprobs import drift_metrics, logprob_metrics
from fp8rl.rl.record.metrics import METRICS, describe

LN2 = math.log(2.0)
ABS_DIFF = "mismatch/train_rollout_logprob_abs_diff"


def from_differences(differences: list[float], **options: float) -> dict[str, float]:
    """Agreement of one row whose trainer logprobs are the rollout's plus these differences, exactly (rollout 0)."""
    d = torch.tensor([differences], dtype=torch.float64)
    return logprob_metrics(d, torch.zeros_like(d), torch.ones_like(d, dtype=torch.bool), **options)


def without_the_breakdown(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name in METRICS}


def percentile(values: list[float], percent: int) -> float:
    """Nearest rank: the smallest value that at least `percent` of all do not exceed."""
    return next(x for x in sorted(values) if 100 * sum(y <= x for y in values) >= percent * len(values))


def spread(name: str, values: list[float]) -> dict[str, float]:
    mean, p50, p99 = math.fsum(values) / len(values), percentile(values, 50), percentile(values, 99)
    return {f"{name}_mean": mean, f"{name}_p50": p50, f"{name}_p99": p99, f"{name}_max": max(values)}


def oracle(train: np.ndarray, rollout: np.ndarray, mask: np.ndarray, tis_cap: float) -> dict[str, float]:
    """Every fixed metric of the formula sheet, term by term in float64."""
    rows, sampled, dropped, broken = [], 0, 0, 0
    for row in range(mask.shape[0]):
        pairs = [(float(train[row, t]), float(rollout[row, t])) for t in range(mask.shape[1]) if mask[row, t]]
        finite = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
        sampled, dropped = sampled + len(pairs), dropped + len(pairs) - len(finite)
        broken += len(finite) < len(pairs)
        if finite:
            rows.append(finite)
    tokens = [pair for row in rows for pair in row]
    d = [a - b for a, b in tokens]
    rho = [math.exp(x) for x in d]
    sums = [math.fsum(a - b for a, b in row) for row in rows]
    means = [total / len(row) for total, row in zip(sums, rows)]
    n = len(d)
    weights = [math.exp(s) for s in sums]
    return {
        "mismatch/tokens": n,
        "mismatch/nonfinite_count": dropped,
        "mismatch/sequences": len(rows),
        "mismatch/nonfinite_sequences": broken,
        **spread(ABS_DIFF, [abs(x) for x in d]),
        **spread("mismatch/token_mult_prob_error", [math.exp(abs(x)) for x in d]),
        **spread("mismatch/rho", rho),
        **spread("mismatch/tis_weight", [min(r, tis_cap) for r in rho]),
        "mismatch/tis_clipfrac": sum(r > tis_cap for r in rho) / n,
        "mismatch/tis_clipfrac_two_sided": sum(min(max(r, 1 / tis_cap), tis_cap) != r for r in rho) / n,
        "mismatch/extreme_frac_2": sum(abs(x) > math.log(2) for x in d) / n,
        "mismatch/extreme_frac_10": sum(abs(x) > math.log(10) for x in d) / n,
        "mismatch/k1_kl": math.fsum(-x for x in d) / n,
        "mismatch/k2_kl": math.fsum(x * x / 2 for x in d) / n,
        "mismatch/k3_kl": math.fsum(r - 1 - x for r, x in zip(rho, d)) / n,
        "mismatch/chi2_token": math.fsum(r * r for r in rho) / n - 1,
        "mismatch/ess": math.fsum(rho) ** 2 / (n * math.fsum(r * r for r in rho)),
        "mismatch/pearson": np.corrcoef(np.exp(np.array(tokens)).T)[0, 1],
        "mismatch/exact_frac": sum(x == 0 for x in d) / n,
        "mismatch/near_exact_frac": sum(abs(x) <= 1e-6 for x in d) / n,
        **spread("mismatch/ppl_ratio", [math.exp(-m) for m in means]),
        **spread("mismatch/geometric_ratio", [math.exp(m) for m in means]),
        "mismatch/chi2_sequence": math.fsum(math.exp(min(max(2 * s, -20), 20)) for s in sums) / len(sums) - 1,
        "mismatch/ess_sequence": math.fsum(weights) ** 2 / (len(sums) * math.fsum(w * w for w in weights)),
    }


@pytest.mark.parametrize(("seed", "noise", "tis_cap"), [(3, 0.5, 1.5), (4, 0.01, 2.0), (5, 1.5, 5.0)])
def test_against_an_independent_float64_oracle(seed: int, noise: float, tis_cap: float) -> None:
    generator = np.random.default_rng(seed)
    rollout = (-generator.exponential(1.0, (40, 37))).astype(np.float32)
    difference = generator.normal(0, noise, (40, 37)) * (generator.random((40, 37)) < 0.7)
    difference[7] = 1e-7  # within 1e-6 and, for most values of rollout, not zero
    train = (rollout + difference).astype(np.float32)
    mask = generator.random((40, 37)) < 0.6
    mask[11] = False
    mask[3, 5] = mask[12, 1:3] = True
    rollout[3, 5] = np.nan
    train[12, 1], train[12, 2] = -np.inf, np.inf

    metrics = logprob_metrics(*map(torch.from_numpy, (train, rollout, mask)), tis_cap=tis_cap)

    expected = oracle(train, rollout, mask, tis_cap)
    assert without_the_breakdown(metrics) == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert (metrics["mismatch/sequences"], metrics["mismatch/nonfinite_sequences"]) == (39, 2)
    assert 0.0 < metrics["mismatch/exact_frac"] < metrics["mismatch/near_exact_frac"] < 1.0


def test_a_bound_itself_is_inside() -> None:
    metrics = from_differences([LN2, -LN2, 3 * LN2, -2 * LN2])  # rho = 2, 1/2, 8, 1/4
    assert (metrics["mismatch/tis_clipfrac"], metrics["mismatch/tis_clipfrac_two_sided"]) == (0.25, 0.5)
    assert metrics["mismatch/extreme_frac_2"] == 0.5


def test_the_smallest_difference_is_not_exact() -> None:
    rollout = torch.tensor([[-1.0, -1.0]])
    train = torch.nextafter(rollout, torch.zeros(1))
    train[0, 0] = -1.0
    metrics = logprob_metrics(train, rollout, torch.ones(1, 2, dtype=torch.bool))
    assert (metrics["mismatch/exact_frac"], metrics["mismatch/near_exact_frac"]) == (0.5, 1.0)
    assert metrics[f"{ABS_DIFF}_max"] == 2.0**-24


@pytest.mark.parametrize("mask", [[0, 0], [1, 1]])
def test_without_a_finite_token_only_the_counts_remain(mask: list[int]) -> None:
    logprobs = torch.full((1, 2), math.nan)
    metrics = logprob_metrics(logprobs, logprobs, torch.tensor([mask], dtype=torch.bool))
    assert metrics == {
        "mismatch/tokens": 0.0,
        "mismatch/nonfinite_count": float(sum(mask)),
        "mismatch/sequences": 0.0,
        "mismatch/nonfinite_sequences": float(any(mask)),
    }


@pytest.mark.parametrize("size", [-1e300, -1e30, -1000.0, 1000.0, 1e30, 1e300])
def test_huge_differences_stay_finite(size: float) -> None:
    metrics = from_differences([size, 0.0])
    assert all(map(math.isfinite, metrics.values()))
    assert metrics[f"{ABS_DIFF}_max"] == abs(size)
    assert metrics["mismatch/rho_max"] == (math.exp(20) if size > 0 else 1.0)
    assert metrics["mismatch/token_mult_prob_error_max"] == math.exp(20)
    assert ("mismatch/k2_kl" in metrics) == (abs(size) < 1e150), "the square of 1e300 is no float"


def test_equal_probabilities_correlate_perfectly_and_constant_ones_not_at_all() -> None:
    logprobs = -torch.rand(1, 4097, generator=torch.Generator().manual_seed(0)) * 10
    everything = torch.ones_like(logprobs, dtype=torch.bool)
    assert logprob_metrics(logprobs, logprobs.clone(), everything)["mismatch/pearson"] == 1.0
    assert "mismatch/pearson" not in logprob_metrics(logprobs, torch.full_like(logprobs, -0.1), everything)


def test_small_divergences_keep_their_digits() -> None:
    # rho - 1 - d is d^2 / 2 here, 5e-17; computed naively it would be lost in the rounding of rho.
    metrics = from_differences([1e-8])
    assert metrics["mismatch/k2_kl"] == pytest.approx(5e-17, rel=1e-9, abs=0.0)
    assert metrics["mismatch/k3_kl"] == pytest.approx(5e-17, rel=1e-4, abs=0.0)
    assert from_differences([1e-17])["mismatch/chi2_token"] == pytest.approx(2e-17, rel=1e-9, abs=0.0)


def test_every_metric_is_described() -> None:
    d = torch.linspace(-1, 1, 2000)[None]
    mask, versions = torch.ones_like(d, dtype=torch.bool), torch.arange(2000)[None] // 10
    metrics = logprob_metrics(d, torch.zeros_like(d), mask) | drift_metrics(d, torch.zeros_like(d), mask, versions, 199)
    assert [name for name in metrics if describe(name) is None] == []


def part(metrics: dict[str, float], kind: str) -> dict[str, float]:
    """The metrics by position, by the rest of their name."""
    return {name.removeprefix("mismatch/"): value for name, value in metrics.items() if f"_{kind}_" in name}


def test_positions_count_the_generated_tokens_of_each_row() -> None:
    # Row 0 begins at column 3, row 1 at column 0; its token at position 2 is dropped but keeps its place.
    d = torch.zeros(2, 100, dtype=torch.float64)
    mask = torch.zeros(2, 100, dtype=torch.bool)
    mask[0, 3:90] = mask[1, :17] = True
    d[0, 3 + 15], d[0, 3 + 16], d[0, 3 + 63], d[0, 3 + 64] = 1.0, -2.0, 4.0, 8.0
    d[1, 2], d[1, 16] = math.nan, 16.0
    expected = {0: (1 / 31, 1.0, 31), 16: (22 / 49, 16.0, 49), 64: (8 / 23, 8.0, 23)}
    found = part(logprob_metrics(d, torch.zeros_like(d), mask), "pos")
    names = ("abs_diff_mean_pos", "abs_diff_max_pos", "tokens_pos")
    rows = [(f"{name}_{at}", value) for at, values in expected.items() for name, value in zip(names, values)]
    assert found == pytest.approx(dict(rows))


def test_positions_count_the_generated_tokens_that_are_not_compared_too() -> None:
    d, mask = torch.zeros(1, 40), torch.ones(1, 40, dtype=torch.bool)
    d[0, 20] = 2.0
    fresh = torch.arange(40)[None] >= 18
    metrics = part(logprob_metrics(d, torch.zeros_like(d), mask, fresh=fresh), "pos")
    assert (metrics["tokens_pos_16"], metrics["abs_diff_max_pos_16"]) == (22, 2.0) and "tokens_pos_0" not in metrics


def of_rows(*rows: list[float]) -> dict[str, float]:
    """Agreement of rows of differences, over rollout logprobs of 0; shorter rows are masked at their end."""
    d = torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)
    chosen = torch.arange(d.shape[1]) < torch.tensor([[len(row)] for row in rows])
    return logprob_metrics(d, torch.zeros_like(d), chosen)


def test_a_sequence_counts_its_finite_tokens_only() -> None:
    # The mean of the first row is that of its two finite tokens, and a row without any is no sequence.
    metrics = of_rows([LN2, math.nan, 3 * LN2], [math.inf], [])
    assert (metrics["mismatch/sequences"], metrics["mismatch/nonfinite_sequences"]) == (1, 2)
    assert metrics["mismatch/geometric_ratio_mean"] == pytest.approx(4.0)
    assert metrics["mismatch/chi2_sequence"] == pytest.approx(2.0**8 - 1)


def test_long_sequences_do_not_overflow() -> None:
    # Sums of ±3000 are cut to exponents of ±20, of e^(2 sum) too; the means, ±3, are not.
    metrics = of_rows([3.0] * 1000, [-3.0] * 1000)
    assert metrics["mismatch/chi2_sequence"] == pytest.approx((math.exp(20) + math.exp(-20)) / 2 - 1)
    assert metrics["mismatch/ess_sequence"] == pytest.approx(0.5)
    assert metrics["mismatch/geometric_ratio_max"] == pytest.approx(math.exp(3))
    assert metrics["mismatch/ppl_ratio_max"] == pytest.approx(math.exp(3))
