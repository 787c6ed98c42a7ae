"""GRPO with asymmetric clipping and a correction for the trainer-rollout mismatch."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from fp8rl.rl.algorithms.parts.advantages import group_advantages
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient


class GroupRelative(PolicyGradient):
    """An answer is measured by the others of its prompt."""

    compares: ClassVar[bool] = True
    formula: ClassVar[str] = "max(-A r, -A clip(r)); A = R - mean of the group, over its std with group_norm_std"

    group_norm_std: bool = True
    """Divide a group's centred rewards by their standard deviation."""

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return group_advantages(rewards, groups, normalize_std=self.group_norm_std)


class Grpo(GroupRelative):
    """Group-relative policy optimisation (Shao et al. 2024, "DeepSeekMath")."""

    name: Literal["grpo"] = "grpo"
