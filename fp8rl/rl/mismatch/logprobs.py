"""Metrics of how far trainer and engine agree on the probability of the tokens that the engine sampled.

d = trainer logprob - rollout logprob and rho = e^d, both at the weights that sampled the token. The metrics need the
trainer's first scores of a batch and the whole loss mask, before anything is rejected: a filter that drops disagreeing
tokens would drive every metric to its ideal value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8rl.rl.mismatch import OLDEST, POSITION_STARTS

MAX_EXPONENT = 20.0
"""Exponents are clamped to ±20 before exp: e^20 is far outside every clip range and still far from overflow."""


def logprob_metrics(
    train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, tis_cap: float = 2.0, fresh: Tensor | None = None
) -> dict[str, float]:
    """Return the `mismatch/...` metrics of one batch; `rl.record.metrics` has their meanings and denominators.

    Tokens whose d is not finite are dropped, and counted in `mismatch/nonfinite_count`. `mismatch/tokens` counts the
    other tokens, and `mismatch/sequences` the rows that have one. All other metrics are divided by these counts. If no
    token remains, only the counts are returned.

    Args:
        train_logprobs: float [B, S].
        rollout_logprobs: float [B, S].
        mask: bool [B, S], the sampled tokens.
        tis_cap: the cap C of importance weights and clip fractions, at least 1. One-sided: rho > C; two-sided: also
            rho < 1/C.
        fresh: bool [B, S], the tokens that the trainer's own weights have sampled; only these are compared. None: all.

    Returns:
        Finite floats by metric name, computed in float64. A metric that is undefined or overflows is left out.
    """
    compared = mask if fresh is None else mask & fresh
    train, rollout = train_logprobs.detach().double(), rollout_logprobs.detach().double()
    difference = train - rollout
    used = compared & torch.isfinite(difference)
    metrics = {
        "mismatch/tokens": float(used.sum()),
        "mismatch/nonfinite_count": float((compared & ~used).sum()),
        "mismatch/sequences": float(used.any(dim=1).sum()),
        "mismatch/nonfinite_sequences": float((compared & ~used).any(dim=1).sum()),
    }
    if not metrics["mismatch/tokens"]:
        return metrics

    d = difference[used]
    metrics |= token_metrics(d, train[used], rollout[used], tis_cap)
    metrics |= sequence_metrics(torch.where(used, difference, 0.0), used)
    metrics |= position_metrics(d, mask, used)
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def row_abs_diff_means(train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> list[float | None]:
    """Return each row's mean abs(d) over its masked tokens with finite d; None without such tokens. Shapes [B, S]."""
    difference = (train_logprobs.detach().double() - rollout_logprobs.detach().double()).abs()
    used = mask & torch.isfinite(difference)
    sums = torch.where(used, difference, 0.0).sum(dim=1)
    return [total / count if count else None for total, count in zip(sums.tolist(), used.sum(dim=1).tolist())]


# Metrics of tokens: every mean and fraction divides by the tokens with finite d.

EXTREME_FACTORS = (2, 10)
"""A token counts as extreme if one of its two probabilities is more than this factor times the other."""
NEARLY = 1e-6
"""The largest abs(d) that counts as nearly exact, in nats: about the rounding of a float32 logprob."""


def token_metrics(d: Tensor, train: Tensor, rollout: Tensor, tis_cap: float) -> dict[str, float]:
    """`mismatch/...` over single tokens; d, train, rollout: float64 [N], finite, with d = train - rollout."""
    abs_d, rho = d.abs(), clamp_exponent(d).exp()
    abs_order, rho_order = order_statistics(abs_d), clamp_exponent(order_statistics(d)).exp()
    above, below = rho > tis_cap, rho < 1.0 / tis_cap
    values = {
        "mismatch/tis_clipfrac": _fraction(above),
        "mismatch/tis_clipfrac_two_sided": _fraction(above | below),
        "mismatch/k1_kl": -d.mean() + 0.0,  # + 0.0 turns -0.0 into 0.0
        "mismatch/k2_kl": (d**2).mean() / 2,
        "mismatch/k3_kl": (clamp_exponent(d).expm1() - d).mean(),  # rho - 1 - d without its cancellation
        "mismatch/chi2_token": clamp_exponent(2 * d).expm1().mean(),
        "mismatch/ess": effective_sample_size(rho),
        "mismatch/exact_frac": _fraction(d == 0),
        "mismatch/near_exact_frac": _fraction(abs_d <= NEARLY),
        **{f"mismatch/extreme_frac_{factor}": _fraction(abs_d > math.log(factor)) for factor in EXTREME_FACTORS},
    }
    metrics = {name: value.item() for name, value in values.items()}
    metrics |= distribution("mismatch/train_rollout_logprob_abs_diff", abs_d.mean(), abs_order)
    metrics |= distribution(
        "mismatch/token_mult_prob_error", clamp_exponent(abs_d).exp().mean(), clamp_exponent(abs_order).exp()
    )
    metrics |= distribution("mismatch/rho", rho.mean(), rho_order)
    metrics |= distribution("mismatch/tis_weight", rho.clamp(max=tis_cap).mean(), rho_order.clamp(max=tis_cap))
    correlation = pearson(*(side.clamp(max=MAX_EXPONENT).exp() for side in (train, rollout)))
    return metrics if correlation is None else metrics | {"mismatch/pearson": correlation}


def pearson(x: Tensor, y: Tensor) -> float | None:
    """Pearson's correlation of two float64 [N], 1.0 exactly for equal ones; None where one of them is constant."""
    # Compared, not computed: the deviations of a constant from its rounded mean need not be zero.
    if bool(x.min() == x.max()) or bool(y.min() == y.max()):
        return None
    x, y = x - x.mean(), y - y.mean()
    # One root of the product, since sqrt(a * a) is a in floating point while sqrt(a) * sqrt(a) need not be.
    norms = ((x * x).sum() * (y * y).sum()).sqrt()
    return None if norms == 0 else float(((x * y).sum() / norms).clamp(-1.0, 1.0))


def _fraction(condition: Tensor) -> Tensor:
    return condition.sum(dtype=torch.float64) / condition.numel()


# Metrics of sequences: every mean divides by the sequences with at least one token of finite d. Of a sequence only its
# tokens with finite d count.


def sequence_metrics(d: Tensor, used: Tensor) -> dict[str, float]:
    """`mismatch/...` over sequences. d: float64 [B, S], 0 where not used; used: bool [B, S] with at least one True."""
    rows = used.any(dim=1)
    total = d.sum(dim=1)[rows]
    log_geometric = clamp_exponent(total / used.sum(dim=1)[rows])
    return {
        **_ratios("mismatch/ppl_ratio", -log_geometric),
        **_ratios("mismatch/geometric_ratio", log_geometric),
        "mismatch/chi2_sequence": clamp_exponent(2 * total).expm1().mean().item(),
        "mismatch/ess_sequence": effective_sample_size(clamp_exponent(total).exp()).item(),
    }


def _ratios(name: str, log_ratios: Tensor) -> dict[str, float]:
    return distribution(name, log_ratios.exp().mean(), order_statistics(log_ratios).exp())


# Metrics by the position of a token in its answer.


def position_metrics(d: Tensor, mask: Tensor, used: Tensor) -> dict[str, float]:
    """`mismatch/..._pos_N`, N from `POSITION_STARTS`, for each bucket with tokens.

    Args:
        d: float64 [N], the differences of the used tokens in row-major order.
        mask: bool [B, S], the sampled tokens; a token's position counts the sampled ones before it in its row.
        used: bool [B, S], the sampled tokens with finite d.
    """
    positions = (mask.cumsum(dim=1) - 1)[used]
    starts = torch.tensor(POSITION_STARTS, device=d.device)
    metrics: dict[str, float] = {}
    buckets = torch.bucketize(positions, starts, right=True) - 1
    for bucket in buckets.unique().tolist():
        name, abs_d = POSITION_STARTS[bucket], d[buckets == bucket].abs()
        metrics[f"mismatch/abs_diff_mean_pos_{name}"] = abs_d.mean().item()
        metrics[f"mismatch/abs_diff_max_pos_{name}"] = abs_d.max().item()
        metrics[f"mismatch/tokens_pos_{name}"] = float(abs_d.numel())
    return metrics


# Metrics of how far the policy has moved since older weights sampled a token. In exact mode a trainer with
# those weights computes the same logprob, so d is the change of the policy alone. In native mode d also has the
# disagreement of both sides.


def drift_metrics(
    train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, versions: Tensor, version: int
) -> dict[str, float]:
    """`drift/...` over the tokens of older versions whose d is finite; nothing where there are none.

    Args:
        train_logprobs, rollout_logprobs: float [B, S].
        mask: bool [B, S], the sampled tokens.
        versions: int64 [B, S], the weight version that sampled each token.
        version: the trainer's weight version while scoring.
    """
    difference = train_logprobs.detach().double() - rollout_logprobs.double()
    old = mask & (versions < version) & difference.isfinite()
    if not bool(old.any()):
        return {}
    d, ages = difference[old], (version - versions[old]).clamp(max=OLDEST)
    metrics = {
        "drift/tokens": float(d.numel()),
        "drift/logprob_abs_diff_mean": d.abs().mean().item(),
        "drift/logprob_abs_diff_max": d.abs().max().item(),
        "drift/k1_kl": -d.mean().item() + 0.0,
        "drift/k3_kl": (clamp_exponent(d).expm1() - d).mean().item(),
        "drift/ess": effective_sample_size(clamp_exponent(d).exp()).item(),
    }
    for age in ages.unique().tolist():
        here = d[ages == age]
        metrics[f"drift/tokens_age_{age}"] = float(here.numel())
        metrics[f"drift/abs_diff_mean_age_{age}"] = here.abs().mean().item()
    return metrics


def tokens_by_age(versions: Tensor, version: int) -> dict[int, int]:
    """Return the number of tokens of each age, min(version - v, `OLDEST`) with v from versions, int64 [N]."""
    ages, counts = (version - versions).clamp(max=OLDEST).unique(return_counts=True)
    return dict(zip(ages.tolist(), counts.tolist(), strict=True))


def clamp_exponent(exponent: Tensor) -> Tensor:
    """Return the exponent clamped to ±20."""
    return exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT)


def order_statistics(values: Tensor) -> Tensor:
    """[median, 99th percentile, maximum] of [N], the percentiles by nearest rank, so that each is a value that occurs.

    So for an increasing f, the order statistics of f(values) are f(order statistics of values).
    """
    ranks = [-(-percent * values.numel() // 100) for percent in (50, 99)]
    return torch.stack([*(values.kthvalue(rank).values for rank in ranks), values.max()])


def distribution(name: str, mean: Tensor, order: Tensor) -> dict[str, float]:
    """`name_mean`, `name_p50`, `name_p99` and `name_max`; mean: scalar, order: as from `order_statistics`."""
    suffixes = ("mean", "p50", "p99", "max")
    return {f"{name}_{suffix}": value for suffix, value in zip(suffixes, [mean.item(), *order.tolist()])}


def effective_sample_size(weights: Tensor) -> Tensor:
    """(Σw)² / (N Σw²) of positive weights [N]: 1 where all are equal, 1/N where one outweighs the rest (Kish)."""
    return weights.sum() ** 2 / (weights.numel() * (weights**2).sum())
