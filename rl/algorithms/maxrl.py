"""MaxRL: the rarer a right answer is, the more it counts."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rl.algorithms.parts.advantages import relative_to_mean
from rl.algorithms.policy_gradient import PolicyGradient


class MaxRl(PolicyGradient):
    """Maximum-likelihood reinforcement learning (Tajwar et al. 2026), for rewards of at least 0."""

    name: Literal["maxrl"]

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return relative_to_mean(rewards, groups)

    @property
    def advantage_text(self) -> str:
        return "(R - mean) / mean, 0 where the mean is 0"
