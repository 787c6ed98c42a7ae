"""REINFORCE++: advantages normalised over the whole batch."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rl.algorithms.policy_gradient import PolicyGradient


class ReinforcePlusPlus(PolicyGradient):
    """Rewards, whitened over all tokens of the batch (Hu et al. 2025, "REINFORCE++")."""

    name: Literal["reinforce++"]
    whiten_advantages: bool = True

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return rewards.float()

    @property
    def advantage_text(self) -> str:
        return "R"
