"""Group-relative advantages: how much better a trajectory did than the others of its prompt."""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Keeps a group of equal rewards at advantage 0 instead of 0/0."""


def group_advantages(rewards: Tensor, groups: Tensor, *, normalize_std: bool) -> Tensor:
    """Advantage of each trajectory within its group.

    With `normalize_std` it is (R - mean) / (std + 1e-6) with the sample standard deviation (ddof 1), as in GRPO
    (DeepSeekMath); without, it is R - mean, as in Dr. GRPO. A group of one has nothing to compare with, so its mean
    counts as 0 and its std as 1.

    Args:
        rewards: float [N], finite.
        groups: int64 [N], equal numbers for trajectories of one prompt, in any order.

    Returns:
        float32 [N]; computed in float64.

    Raises:
        ValueError: shapes differ or a reward is not finite.
    """
    if rewards.dim() != 1 or rewards.shape != groups.shape:
        raise ValueError(f"groups: found shape {list(groups.shape)}, expected [N] like rewards {list(rewards.shape)}")
    if not bool(torch.isfinite(rewards).all()):
        bad = torch.nonzero(~torch.isfinite(rewards)).flatten().tolist()
        raise ValueError(f"rewards: found non-finite values at {bad}, expected numbers; correct the reward function")
    rewards = rewards.double()
    _, member, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(counts), dtype=torch.float64)
    alone = counts == 1

    mean = zeros.index_add(0, member, rewards) / counts
    mean = torch.where(alone, 0.0, mean)
    centred = rewards - mean[member]
    if not normalize_std:
        return centred.float()
    variance = zeros.index_add(0, member, centred.square()) / (counts - 1).clamp(min=1)
    std = torch.where(alone, 1.0, variance.sqrt())
    return (centred / (std + STD_EPSILON)[member]).float()
