"""On-policy distillation: a teacher gives its log-probability of each token that the policy has sampled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fp8rl.rl.algorithms.base import Needs, Outcomes, used_tokens
from fp8rl.rl.algorithms.grpo import GroupRelative
from fp8rl.trainer.step.batch import Objective, ObjectiveOutput, TokenBatch


class Opd(GroupRelative):
    """On-policy distillation (Agarwal et al. 2024): the policy learns from a teacher's log-probabilities of tokens that
    the policy has sampled. Each token has its own advantage (Thinking Machines 2025, slime, miles), which estimates the
    gradient of KL(policy || teacher)."""

    name: Literal["opd"]
    compares_in_group: ClassVar[bool] = False
    formula: ClassVar[str] = (
        "max(-A r, -A clip(r)); A = teacher_weight (teacher's logprob - sg(logprob)) + reward_weight A of grpo"
    )
    teacher_weight: float = Field(default=1.0, gt=0.0)
    """The factor of the teacher's part of the advantage."""
    reward_weight: float = Field(default=0.0, ge=0.0)
    """The factor of the advantage that `grpo` computes from the answer's reward. 0: only the teacher counts."""

    @model_validator(mode="after")
    def _what_acts_on_rewards_has_some(self) -> Self:
        named = [name for name in ("dynamic_sampling", "whiten_advantages") if getattr(self, name)]
        if named and not self.reward_weight:
            raise ValueError(
                f"found {named[0]}=true with reward_weight=0, expected false: the setting acts on rewards, and this "
                f"weight leaves them out. Set algorithm.reward_weight, or remove algorithm.{named[0]}"
            )
        return self

    @property
    def needs(self) -> Needs:
        return replace(super().needs, teacher=True)

    def advantages(self, outcomes: Outcomes, batch: TokenBatch) -> Tensor:
        """The advantages at the sampling weights. `Distillation` corrects them to the policy's weights."""
        used = used_tokens(batch)
        if self.overlong is not None and self.overlong.filter:
            used = used & outcomes.finished[:, None]
        gap = batch.fields["teacher_logprobs"] - batch.fields["rollout_logprobs"]
        taught = self.teacher_weight * torch.where(used, gap, 0.0)
        return taught + self.reward_weight * super().advantages(outcomes, batch) if self.reward_weight else taught

    def objective(self, batch: TokenBatch) -> Distillation:
        return Distillation(super().objective(batch), self.teacher_weight, int(used_tokens(batch).sum()))

    def notes(self) -> list[str]:
        said = "teacher_weight: 1, as slime's and miles' opd-kl-coef; verl and NeMo-RL can take the teacher's most "
        return [*super().notes(), said + "probable tokens instead of the sampled one"]


@dataclass(frozen=True)
class Distillation:
    """The loss of `Opd`, with KL(policy || teacher) as a metric.

    On tokens of any sampler, the gradient of KL(policy || teacher) is the mean of r (logprob - teacher logprob)
    ∇ logprob. logprob is the current policy's; in exact mode, on tokens of the current weights, also the sampler's.
    """

    policy: Objective
    teacher_weight: float
    tokens: int
    """Used tokens of the whole batch."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch) -> ObjectiveOutput:
        used, fields, own = used_tokens(batch), batch.fields, logprobs.detach()
        moved = torch.where(used, fields["rollout_logprobs"] - own, 0.0)
        advantages = fields["advantages"] + self.teacher_weight * moved
        output = self.policy(logprobs, entropy, batch.with_fields(advantages=advantages))
        kl = torch.where(used, own - fields["teacher_logprobs"], 0.0).sum() / self.tokens
        return ObjectiveOutput(output.loss, output.metrics | {"train/teacher_kl": kl})
