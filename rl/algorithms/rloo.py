"""RLOO: an answer is measured by the mean of the others alone."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rl.algorithms.parts.advantages import leave_one_out
from rl.algorithms.policy_gradient import PolicyGradient


class Rloo(PolicyGradient):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, "Back to Basics")."""

    name: Literal["rloo"]

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return leave_one_out(rewards, groups)

    @property
    def advantage_text(self) -> str:
        return "R - mean of the prompt's other answers"
