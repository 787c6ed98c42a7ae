"""Generalised advantage estimation (Schulman et al. 2016, "High-Dimensional Continuous Control")."""

from __future__ import annotations

import torch
from torch import Tensor


def last_of_each_row(used: Tensor) -> Tensor:
    """bool [B, S], the last used token of each row; nowhere in a row without any."""
    seen = used.flip(1).cumsum(dim=1).flip(1)
    return used & (seen == 1)


def to_go(values: Tensor) -> Tensor:
    """[B, S], the sum over each token and all that follow it in its row."""
    return values.flip(1).cumsum(dim=1).flip(1)


def generalised_advantages(rewards: Tensor, values: Tensor, used: Tensor, gamma: float, trace: float) -> Tensor:
    """A_t = d_t + gamma · trace · A_next with d_t = reward_t + gamma · V_next - V_t; next is the next *used* token, so
    that what lies between them (a tool's answer) changes nothing. After the last one A and V are 0.

    Args:
        rewards: [B, S] of each token.
        values: [B, S], what was expected before the token.
        used: bool [B, S].
        trace: lambda. 1 sums up rewards, 0 looks at the next value alone.

    Returns:
        float64 [B, S], 0 on tokens that are not used.
    """
    rewards, values = rewards.double(), values.double()
    advantages = torch.zeros_like(values)
    next_value, next_advantage = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        here = used[:, t]
        surprise = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = surprise + gamma * trace * next_advantage
        advantages[:, t] = torch.where(here, advantage, 0.0)
        next_value = torch.where(here, values[:, t], next_value)
        next_advantage = torch.where(here, advantage, next_advantage)
    return advantages
