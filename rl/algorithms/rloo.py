"""RLOO: an answer is measured by the mean of the others alone."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from fp8rl.rl.algorithms.parts.advantages import leave_one_out
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient


class Rloo(PolicyGradient):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, "Back to Basics")."""

    name: Literal["rloo"]
    least_group: ClassVar[int] = 2
    formula: ClassVar[str] = "max(-A r, -A clip(r)); A = R - mean of the group's other answers"

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return leave_one_out(rewards, groups)
