"""REINFORCE++, with and without a baseline: advantages are whitened over the whole batch."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from fp8rl.rl.algorithms.base import Outcomes
from fp8rl.rl.algorithms.grpo import group_advantages
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.trainer.step.batch import TokenBatch


class ReinforcePlusPlus(PolicyGradient):
    """REINFORCE++ (Hu et al. 2025): an answer's reward is whitened over all tokens of the batch."""

    name: Literal["reinforce++"]
    formula: ClassVar[str] = "max(-A r, -A clip(r)); A = R"
    whiten_advantages: bool = True
    token_rewards: ClassVar[bool] = True

    def token_advantages(self, outcomes: Outcomes, batch: TokenBatch) -> Tensor:
        advantages = super().token_advantages(outcomes, batch)
        if not self.kl.reward.coefficient:
            return advantages
        to_go = self.kl_penalty(batch).flip(1).cumsum(dim=1).flip(1)  # of each token and all tokens after it in its row
        return torch.where(batch.loss_mask, advantages - to_go, 0.0).float()

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return rewards.float()


class ReinforcePlusPlusBaseline(PolicyGradient):
    """REINFORCE++ with a baseline (Hu et al. 2025): an answer's reward minus the mean reward of its prompt is whitened
    over all tokens of the batch. It is not divided by the prompt's standard deviation."""

    name: Literal["reinforce++-baseline"]
    compares_in_group: ClassVar[bool] = True
    formula: ClassVar[str] = "max(-A r, -A clip(r)); A = R - mean of the group"
    whiten_advantages: bool = True
    token_rewards: ClassVar[bool] = True

    def token_advantages(self, outcomes: Outcomes, batch: TokenBatch) -> Tensor:
        advantages = super().token_advantages(outcomes, batch)
        return (advantages - self.kl_penalty(batch)).float() if self.kl.reward.coefficient else advantages

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return group_advantages(rewards, groups, normalize_std=False, group_size=self._group_size)
