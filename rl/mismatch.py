"""How far trainer and engine disagree on the probability of the tokens that the engine sampled.

d = trainer logprob - rollout logprob and rho = e^d, both at the weights that sampled the token. Call with the
trainer's first scoring of a batch and with the whole loss mask, before anything is rejected: a filter that drops
disagreeing tokens would drive every metric here to its ideal value.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_EXPONENT = 20.0
"""d is clamped to ±20 before exp; beyond, rho says nothing more, and it must not overflow."""


def agreement(
    train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, tis_cap: float = 2.0
) -> dict[str, float]:
    """The agreement metrics of one batch; their meanings stand in `rl.metrics`.

    Tokens whose d is not finite are dropped and counted in `mismatch/nonfinite_count`. Every mean and fraction
    divides by the tokens that remain, `mismatch/tokens`. If none remain only these two keys are returned.

    Args:
        train_logprobs: float [B, S].
        rollout_logprobs: float [B, S].
        mask: bool [B, S], the sampled tokens.
        tis_cap: C of the clip fractions, at least 1: one-sided rho > C; two-sided also rho < 1/C.

    Returns:
        Finite floats by metric name; computed in float64.
    """
    if not train_logprobs.shape == rollout_logprobs.shape == mask.shape:
        shapes = [list(t.shape) for t in (train_logprobs, rollout_logprobs, mask)]
        raise ValueError(f"found shapes {shapes} of trainer logprobs, rollout logprobs and mask, expected equal ones")
    if not tis_cap >= 1.0:
        raise ValueError(f"tis_cap: found {tis_cap}, expected a number of at least 1")
    difference = _difference(train_logprobs, rollout_logprobs)[mask]
    d = difference[torch.isfinite(difference)]
    counts = {"mismatch/tokens": float(d.numel()), "mismatch/nonfinite_count": float(difference.numel() - d.numel())}
    if d.numel() == 0:
        return counts

    abs_d = d.abs()
    exponent = d.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    rho = exponent.exp()
    above, below = rho > tis_cap, rho < 1.0 / tis_cap
    values = {
        "mismatch/train_rollout_logprob_abs_diff_mean": abs_d.mean(),
        "mismatch/train_rollout_logprob_abs_diff_p99": _percentile(abs_d, 99),
        "mismatch/train_rollout_logprob_abs_diff_max": abs_d.max(),
        "mismatch/tis_clipfrac": above.double().mean(),
        "mismatch/tis_clipfrac_two_sided": (above | below).double().mean(),
        "mismatch/k1_kl": -d.mean() + 0.0,  # + 0.0 turns -0.0 into 0.0
        "mismatch/k3_kl": (exponent.expm1() - d).mean(),  # rho - 1 - d without its cancellation
        "mismatch/exact_frac": (d == 0).double().mean(),
    }
    return counts | {name: value.item() for name, value in values.items()}


def row_abs_diff_means(train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> list[float | None]:
    """Mean abs(d) of each row over its masked tokens with finite d, None for a row without any; shapes [B, S]."""
    difference = _difference(train_logprobs, rollout_logprobs).abs()
    used = mask & torch.isfinite(difference)
    sums = torch.where(used, difference, 0.0).sum(dim=1)
    return [total / count if count else None for total, count in zip(sums.tolist(), used.sum(dim=1).tolist())]


def _difference(train_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    return train_logprobs.detach().double() - rollout_logprobs.detach().double()


def _percentile(values: Tensor, percent: int) -> Tensor:
    """Nearest-rank percentile of [N]: the smallest value that at least `percent` of all do not exceed."""
    rank = -(-percent * values.numel() // 100)
    return values.kthvalue(rank).values
