"""Statistics that the metrics of tokens and of sequences share: bounded exponents, percentiles and the effective sample
size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fp8rl.rollout.types import Trajectory

MAX_EXPONENT = 20.0
"""Exponents are clamped to ±20 before exp; beyond, a ratio says nothing more, and it must not overflow."""


def bounded(exponent: Tensor) -> Tensor:
    """The exponent clamped to ±20."""
    return exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT)


def order_statistics(values: Tensor) -> Tensor:
    """[median, 99th percentile, maximum] of [N], the percentiles by nearest rank, so that each is a value that occurs.

    An increasing function of the values has that function of these as its own.
    """
    return torch.stack([_percentile(values, 50), _percentile(values, 99), values.max()])


def distribution(name: str, mean: Tensor, order: Tensor) -> dict[str, float]:
    """`name_mean`, `name_p50`, `name_p99` and `name_max`; mean: scalar, order: as from `order_statistics`."""
    suffixes = ("mean", "p50", "p99", "max")
    return {f"{name}_{suffix}": value for suffix, value in zip(suffixes, [mean.item(), *order.tolist()])}


def effective_sample_size(weights: Tensor) -> Tensor:
    """(Σw)² / (N Σw²) of positive weights [N]: 1 where all are equal, 1/N where one outweighs the rest (Kish)."""
    return weights.sum() ** 2 / (weights.numel() * (weights**2).sum())


def _percentile(values: Tensor, percent: int) -> Tensor:
    """The smallest value that at least `percent` of all do not exceed."""
    rank = -(-percent * values.numel() // 100)
    return values.kthvalue(rank).values


# Where in a batch the disagreement sits, and which weights have sampled each token.

POSITION_STARTS = (0, 16, 64, 256, 1024, 4096, 16384)
"""First position of each bucket of generated tokens; the last bucket is open. An answer's first token is at 0."""


def position_metrics(d: Tensor, mask: Tensor, used: Tensor) -> dict[str, float]:
    """`mismatch/..._pos_N`, N from `POSITION_STARTS`, for each bucket with tokens.

    Args:
        d: float64 [N], the differences of the used tokens in row-major order.
        mask: bool [B, S], the sampled tokens; a token's position counts the sampled ones before it in its row.
        used: bool [B, S], of which these with finite d.
    """
    positions = (mask.cumsum(dim=1) - 1)[used]
    starts = torch.tensor(POSITION_STARTS, device=d.device)
    metrics: dict[str, float] = {}
    for start, abs_d in _split(torch.bucketize(positions, starts, right=True) - 1, d.abs()):
        name = POSITION_STARTS[start]
        metrics[f"mismatch/abs_diff_mean_pos_{name}"] = abs_d.mean().item()
        metrics[f"mismatch/abs_diff_max_pos_{name}"] = abs_d.max().item()
        metrics[f"mismatch/tokens_pos_{name}"] = float(abs_d.numel())
    return metrics


def token_versions(trajectories: Sequence[Trajectory], mask: Tensor) -> Tensor:
    """int64 [B, S], the weight version that sampled each token, 0 elsewhere; mask: bool [B, S], the sampled tokens.

    Row b is trajectory b, as `batch_from_trajectories` lays them out.
    """
    versions = torch.zeros(mask.shape, dtype=torch.int64)
    versions[mask] = torch.tensor([v for t in trajectories for v in t.weight_versions], dtype=torch.int64)
    return versions


def _split(groups: Tensor, values: Tensor) -> list[tuple[int, Tensor]]:
    """The values of each group that has any; groups: int64 [N] from 0, values: [N]."""
    present = groups.bincount().nonzero().flatten().tolist()
    return [(group, values[groups == group]) for group in present]
