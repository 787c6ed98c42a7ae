"""The agreement of trainer and engine on the probability of the tokens that the engine sampled.

d = trainer logprob - rollout logprob and rho = e^d, both at the weights that sampled the token. Call with the
trainer's first scoring of a batch and with the whole loss mask, before anything is rejected: a filter that drops
disagreeing tokens would drive every metric here to its ideal value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8rl.rl.mismatch.breakdown import position_metrics
from fp8rl.rl.mismatch.sequences import sequence_metrics
from fp8rl.rl.mismatch.tokens import token_metrics


def agreement(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float = 2.0,
    fresh: Tensor | None = None,
) -> dict[str, float]:
    """The agreement metrics of one batch; their meanings and denominators stand in `rl.record.metrics`.

    Tokens whose d is not finite are dropped and counted in `mismatch/nonfinite_count`. What remains are the
    `mismatch/tokens`, and the rows with any of them the `mismatch/sequences`: the denominators of everything else. If
    none remain only the counts are returned.

    Args:
        train_logprobs: float [B, S].
        rollout_logprobs: float [B, S].
        mask: bool [B, S], the sampled tokens.
        cap: C of the importance weights and clip fractions, at least 1: one-sided rho > C; two-sided also
            rho < 1/C.
        fresh: bool [B, S], the tokens that the trainer's own weights have sampled, which alone are compared; None: all.

    Returns:
        Finite floats by metric name, computed in float64. One that is undefined or overflows is left out.

    Raises:
        ValueError: shapes differ, or `cap` is below 1.
    """
    compared = mask if fresh is None else mask & fresh
    tensors = [train_logprobs, rollout_logprobs, mask, compared]
    if len({tensor.shape for tensor in tensors}) > 1:
        shapes = [list(tensor.shape) for tensor in tensors]
        raise ValueError(f"found shapes {shapes} of both logprobs and masks, expected equal ones")
    if not cap >= 1.0:
        raise ValueError(f"cap: found {cap}, expected a number of at least 1")
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
    metrics |= token_metrics(d, train[used], rollout[used], cap)
    metrics |= sequence_metrics(torch.where(used, difference, 0.0), used)
    metrics |= position_metrics(d, mask, used)
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def row_abs_diff_means(train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> list[float | None]:
    """Mean abs(d) of each row over its masked tokens with finite d, None for a row without any; shapes [B, S]."""
    difference = (train_logprobs.detach().double() - rollout_logprobs.detach().double()).abs()
    used = mask & torch.isfinite(difference)
    sums = torch.where(used, difference, 0.0).sum(dim=1)
    return [total / count if count else None for total, count in zip(sums.tolist(), used.sum(dim=1).tolist())]
