"""Advantages: how much better an answer, or a token of an answer, did than expected.

Equal numbers mark the trajectories of one group. They may come in any order, and groups may differ in size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rl.numerics.core.errors import user_error

STD_EPSILON = 1e-6
"""Keeps a group of equal rewards at advantage 0 instead of 0/0."""
VARIANCE_FLOOR = 1e-8
"""Keeps equal advantages at 0 when they are whitened."""


def group_advantages(rewards: Tensor, groups: Tensor, *, normalize_std: bool, group_size: int = 1) -> Tensor:
    """Return the advantage of each trajectory within the group of its prompt.

    With `normalize_std` it is (R - mean) / (std + 1e-6) with the sample standard deviation (ddof 1), as in GRPO
    (DeepSeekMath); without, it is R - mean, as in Dr. GRPO. A group of one has the mean 0 and the std 1 if `group_size`
    is 1. If `group_size` is larger, its other answers have failed, and its advantage is 0.

    Args:
        rewards: float [N], finite.
        groups: int64 [N], equal numbers for trajectories of one prompt, in any order.
        group_size: number of answers sampled for each prompt.

    Returns:
        float32 [N]; computed in float64.
    """
    rewards, member, counts, means = _grouped(rewards, groups)
    alone = counts == 1
    centred = torch.where(alone, rewards, rewards - means) if group_size == 1 else rewards - means
    if not normalize_std:
        return centred.float()
    variance = _sums(centred.square(), member) / (counts - 1).clamp(min=1)
    std = torch.where(alone, 1.0, variance.sqrt())
    return (centred / (std + STD_EPSILON)).float()


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """Reward less the mean of the *other* trajectories of the prompt, as in RLOO (Ahmadian et al. 2024, "Back to
    Basics"). A group of one gives 0. Arguments and result: as in `group_advantages`.
    """
    rewards, _, counts, means = _grouped(rewards, groups)
    return ((rewards - means) * counts / (counts - 1).clamp(min=1)).float()


def relative_to_mean(rewards: Tensor, groups: Tensor) -> Tensor:
    """(R - mean) / mean, 0 in a group of mean 0, as in MaxRL (Tajwar et al. 2026, "Maximum Likelihood Reinforcement
    Learning"): the fewer answers of a prompt are right, the more each right answer counts. Arguments and result: as in
    `group_advantages`. Raises UserError: a reward is negative."""
    rewards, _, _, means = _grouped(rewards, groups)
    if bool((rewards < 0).any()):
        expected = "none below 0, as maxrl divides by the mean reward of a group"
        remedy = "Correct the reward functions or their weights, or choose another algorithm."
        raise user_error("rewards", float(rewards.min()), expected, remedy)
    return torch.where(means > 0, (rewards - means) / means, 0.0).float()


def per_token(values: Tensor, batch_mask: Tensor) -> Tensor:
    """Give each row's value [B] to its target tokens, which `batch_mask` [B, S] marks. float32 [B, S], 0 elsewhere."""
    return torch.where(batch_mask, values.float()[:, None], 0.0)


def whitened(advantages: Tensor, used: Tensor) -> Tensor:
    """(A - mean) / sqrt(variance + 1e-8) over all used tokens of the batch, as in REINFORCE++ (Hu et al. 2025). float32
    [B, S], 0 on tokens that are not used; computed in float64.
    """
    values = advantages[used].double()
    variance, mean = torch.var_mean(values, correction=0)
    white = torch.zeros(advantages.shape, dtype=torch.float32)
    white[used] = ((values - mean) / (variance + VARIANCE_FLOOR).sqrt()).float()
    return white


def _grouped(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the reward of each trajectory in float64, and the index, size and mean reward of its group; all [N]."""
    rewards = rewards.double()
    _, member = torch.unique(groups, return_inverse=True)
    counts = _sums(torch.ones_like(rewards), member)
    return rewards, member, counts, _sums(rewards, member) / counts


def _sums(values: Tensor, member: Tensor) -> Tensor:
    """Return for each trajectory the sum of `values` [N] over its group."""
    return torch.zeros_like(values).index_add(0, member, values)[member]


# Generalised advantage estimation (Schulman et al. 2016, "High-Dimensional Continuous Control").


def last_of_each_row(used: Tensor) -> Tensor:
    """bool [B, S], true at the last used token of each row; a row without used tokens has none."""
    seen = used.flip(1).cumsum(dim=1).flip(1)
    return used & (seen == 1)


def rewards_to_go(values: Tensor) -> Tensor:
    """[B, S], the sum of the values of each token and of all tokens after it in its row."""
    return values.flip(1).cumsum(dim=1).flip(1)


def generalised_advantages(rewards: Tensor, values: Tensor, used: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimation (GAE): A_t = d_t + gamma · lambda · A_next.

    d_t = reward_t + gamma · V_next - V_t. "next" is the next used token, so a tool's answer in between changes nothing.
    After the last used token A and V are 0.

    Args:
        rewards: [B, S] of each token.
        values: [B, S], the return that the critic expected before the token.
        used: bool [B, S].
        gae_lambda: with 1, A sums up all later rewards; with 0, A looks only at the next value.

    Returns:
        float64 [B, S], 0 on tokens that are not used.
    """
    rewards, values = rewards.double(), values.double()
    advantages = torch.zeros_like(values)
    next_value, next_advantage = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        here = used[:, t]
        td_error = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = td_error + gamma * gae_lambda * next_advantage
        advantages[:, t] = torch.where(here, advantage, 0.0)
        next_value = torch.where(here, values[:, t], next_value)
        next_advantage = torch.where(here, advantage, next_advantage)
    return advantages
