"""REINFORCE++ with a baseline: a prompt's mean is taken off, and the whole batch gives the scale."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rl.algorithms.advantages import group_advantages
from rl.algorithms.policy_gradient import PolicyGradient


class ReinforcePlusPlusBaseline(PolicyGradient):
    """Rewards less the mean of their prompt, whitened over all tokens of the batch (Hu et al. 2025, "REINFORCE++"); no
    standard deviation of the prompt."""

    name: Literal["reinforce++-baseline"]
    whiten_advantages: bool = True

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return group_advantages(rewards, groups, normalize_std=False)

    @property
    def advantage_text(self) -> str:
        return "R - mean"
