"""REINFORCE++: advantages normalised over the whole batch."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from fp8rl.rl.algorithms.base import Outcomes
from fp8rl.rl.algorithms.parts.advantages import to_go
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.trainer.step.batch import TokenBatch


class ReinforcePlusPlus(PolicyGradient):
    """Rewards, whitened over all tokens of the batch (Hu et al. 2025, "REINFORCE++")."""

    name: Literal["reinforce++"]
    formula: ClassVar[str] = "max(-A r, -A clip(r)); A = R less the price of kl.reward, whitened"
    whiten_advantages: bool = True
    token_rewards: ClassVar[bool] = True

    def token_advantages(self, outcomes: Outcomes, batch: TokenBatch) -> Tensor:
        advantages = super().token_advantages(outcomes, batch)
        if not self.kl.reward.coefficient:
            return advantages
        return torch.where(batch.loss_mask, advantages - to_go(self.kl_price(batch)), 0.0).float()

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return rewards.float()
