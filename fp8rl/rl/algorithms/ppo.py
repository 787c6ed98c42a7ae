"""PPO: a critic predicts the return at each token. The advantage compares the actual return with the prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fp8rl.rl.algorithms.base import Needs, Outcomes, used_tokens
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.trainer.config import RateSection, TrainerSection
from fp8rl.trainer.step.batch import Objective, ObjectiveOutput, TokenBatch


class CriticSection(RateSection):
    """Training of the critic. All other settings are the same as in the `trainer` section."""

    lr: float = Field(default=1e-5, gt=0.0, le=100.0)
    """Peak learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up from zero."""


class Ppo(PolicyGradient):
    """Proximal policy optimisation with generalised advantages (Schulman et al. 2017). The critic is a second model
    from the same directory, with a value head. It has the policy's ranks, layout and numerics."""

    name: Literal["ppo"]
    formula: ClassVar[str] = "max(-A r, -A clip(r)); A = GAE over a critic's values"
    clip_high: float = Field(default=0.2, gt=0.0)
    whiten_advantages: bool = True
    token_rewards: ClassVar[bool] = True

    gamma: float = Field(default=1.0, gt=0.0, le=1.0)
    """The discount of a reward per token."""
    gae_lambda: float = Field(default=1.0, ge=0.0, le=1.0)
    """Lambda of generalised advantages. 1: return minus value. 0: reward plus next value minus value."""
    critic: CriticSection = CriticSection()
    """How the critic is trained."""
    critic_warmup: int = Field(default=0, ge=0)
    """Number of first steps in which only the critic learns. The policy's learning-rate schedule starts after them."""
    value_clip: float | None = Field(default=0.2, gt=0.0)
    """The critic's loss also has a term in which a value differs by at most this number from the value before the
    batch's first update. Null: no such term."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, critic=True)

    def critic_config(self, trainer: TrainerSection) -> TrainerSection:
        return trainer.model_copy(update=self.critic.model_dump())

    def learns(self, step: int) -> bool:
        return step > self.critic_warmup

    def training_fields(self, outcomes: Outcomes, batch: TokenBatch) -> dict[str, Tensor]:
        outcomes = self.shaped(outcomes, batch)
        advantages = self.measured_advantages(outcomes, batch)
        returns = torch.where(used_tokens(batch), advantages + batch.fields["values"], 0.0)
        fields = {"advantages": self.finished(advantages, outcomes, batch), "returns": returns}
        return fields | self.filtered(outcomes, batch)

    def token_advantages(self, outcomes: Outcomes, batch: TokenBatch) -> Tensor:
        used = used_tokens(batch)
        last = used & (used.flip(1).cumsum(dim=1).flip(1) == 1)  # of each row; a row without used tokens has none
        rewards = torch.where(last, outcomes.rewards.double()[:, None], 0.0)
        if self.kl.reward.coefficient:
            rewards = rewards - self.kl_penalty(batch)
        values = batch.fields["values"]
        return generalised_advantages(rewards, values, used, self.gamma, self.gae_lambda).float()

    def critic_objective(self, batch: TokenBatch) -> Objective:
        return ValueObjective(int(used_tokens(batch).sum()), self.value_clip)

    def notes(self) -> list[str]:
        alone = f"critic_warmup: the critic learns alone in the first {self.critic_warmup} steps, the policy does not"
        return [
            *super().notes(),
            *[alone] * (self.critic_warmup > 0),
            "value_clip: 0.2 as in slime and miles, 0.5 in verl, OpenRLHF and AReaL; the factor 1/2 of the critic's "
            "loss is verl's and OpenRLHF's, not slime's",
        ]


@dataclass(frozen=True)
class ValueObjective:
    """The critic's loss: the mean over used tokens of max((V - G)², (V_old + clamp(V - V_old, ±clip) - G)²) / 2. G is
    `fields["returns"]`, V_old is `fields["values"]`."""

    tokens: int
    """Used tokens of the whole batch."""
    clip: float | None
    """Bound on the change of a value; None: the loss has only the first of the two terms."""

    def __call__(self, values: Tensor, entropy: Tensor, batch: TokenBatch) -> ObjectiveOutput:
        used, returns, old = used_tokens(batch), batch.fields["returns"], batch.fields["values"]
        losses = (values - returns).square()
        clipped = torch.zeros_like(used)
        if self.clip is not None:
            bounded = (old + (values - old).clamp(-self.clip, self.clip) - returns).square()
            clipped = bounded > losses
            losses = torch.maximum(losses, bounded)

        def token_mean(per_token: Tensor) -> Tensor:
            return torch.where(used, per_token, 0.0).sum() / self.tokens

        metrics = {
            "critic/values_mean": token_mean(values),
            "critic/returns_mean": token_mean(returns),
            "critic/clip_fraction": token_mean(clipped.float()),
        }
        return ObjectiveOutput(token_mean(losses) / 2, metrics)


def generalised_advantages(rewards: Tensor, values: Tensor, used: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimation (GAE; Schulman et al. 2016, "High-Dimensional Continuous Control"):
    A_t = d_t + gamma · lambda · A_next.

    d_t = reward_t + gamma · V_next - V_t. "next" is the next used token, so a tool's answer in between changes nothing.
    After the last used token A and V are 0. With gae_lambda=1, A sums up all later rewards; with 0, it looks only at
    the next value.

    rewards: [B, S] of each token. values: [B, S], the return that the critic expected before the token. used: bool
    [B, S]. The result is float64 [B, S], 0 on tokens that are not used.
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
