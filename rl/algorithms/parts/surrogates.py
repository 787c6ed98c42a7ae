"""Surrogate losses of the policy gradient, per token, to be minimised.

d = logprob - old is a token's log-ratio of the policy to what it was when the batch was sampled, r = e^d, A its
advantage, sg a value without gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from pydantic import Field, field_validator
from torch import Tensor

from fp8rl.numerics.core.section import Section
from fp8rl.rl.algorithms.base import Outcomes
from fp8rl.rl.mismatch.statistics import clamp_exponent


@dataclass(frozen=True)
class Surrogate:
    """The loss of each token. Values of tokens that are not used mean nothing, and their gradients are 0 or finite."""

    losses: Tensor
    """[B, S] with gradient."""
    ratio: Tensor
    """The ratio that was clipped."""
    below: Tensor
    """bool [B, S], where the lower bound of the clip changed a term."""
    above: Tensor
    """bool [B, S], where the upper bound did."""


def token_ratio(logprobs: Tensor, old: Tensor, used: Tensor) -> Tensor:
    """r, 1 on unused tokens so that neither their values nor their gradients can be NaN."""
    return _log_ratio(logprobs, old, used).exp()


def sequence_ratio(logprobs: Tensor, old: Tensor, used: Tensor) -> Tensor:
    """s = e^(mean of d over the sequence) at each of its tokens, with the gradient of the token's own logprob.

    sg(s) · e^(logprob - sg(logprob)): with one advantage per sequence and the mean over its tokens, the gradient is
    that of s itself (GSPO-token; Zheng et al. 2025, "Group Sequence Policy Optimization").
    """
    d = _log_ratio(logprobs, old, used)
    mean = d.sum(dim=1, keepdim=True) / used.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(used, mean.detach() + d - d.detach(), 0.0).exp()


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> Surrogate:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO; Schulman et al. 2017); where A < 0 at most -A dual, so that a
    ratio that has run away does not rule the step (dual clip; Ye et al. 2020).
    """
    plain, cut = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    losses, changed = torch.maximum(plain, cut), cut > plain
    above = changed & (advantages > 0)
    if dual is not None:
        bound = -advantages * dual
        ruled = (advantages < 0) & (losses > bound)
        losses, above = torch.where(ruled, bound, losses), above | ruled
    return Surrogate(losses, ratio, changed & (advantages < 0), above)


def clipped_weight(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, used: Tensor, low: float, high: float
) -> Surrogate:
    """-sg(clip(r, 1 - low, 1 + high)) · A · logprob: a clipped token keeps its gradient, its weight is bounded (CISPO;
    MiniMax 2025, "MiniMax-M1").
    """
    detached = ratio.detach()
    weight = detached.clamp(1.0 - low, 1.0 + high)
    losses = -weight * advantages * torch.where(used, logprobs, 0.0)
    return Surrogate(losses, detached, detached < 1.0 - low, detached > 1.0 + high)


def _log_ratio(logprobs: Tensor, old: Tensor, used: Tensor) -> Tensor:
    return clamp_exponent(torch.where(used, logprobs - old, 0.0))


# Which mean the loss is: how the losses of tokens become one number, with the denominators of the whole batch.

Mode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


@dataclass(frozen=True)
class Aggregation:
    """A mean over the batch that adds up over rows, wherever they are computed.

    `token_mean`: every token counts the same (DAPO). `seq_mean_token_mean`: every sequence does (GRPO as published,
    GSPO). `seq_mean_token_sum`: so does every sequence, by the sum of its tokens. `seq_mean_token_sum_norm`: the same
    over a constant length, so that the length of an answer does not weigh its tokens (Dr. GRPO).
    """

    mode: Mode
    tokens: int
    """Used tokens of the whole batch."""
    sequences: int
    """Rows of the whole batch with at least one used token."""
    length: int = 1
    """The length that `seq_mean_token_sum_norm` divides by."""

    @classmethod
    def of(cls, used: Tensor, mode: Mode, length: int = 1) -> Aggregation:
        """used: bool [B, S] of the whole batch."""
        return cls(mode, int(used.sum()), int(used.any(dim=1).sum()), length)

    def __call__(self, losses: Tensor, used: Tensor) -> Tensor:
        """The share of these rows: losses [b, S], 0 on tokens that are not used."""
        if self.mode == "token_mean":
            return losses.sum() / self.tokens
        sums = losses.sum(dim=1)
        if self.mode == "seq_mean_token_mean":
            sums = sums / used.sum(dim=1).clamp(min=1)
        elif self.mode == "seq_mean_token_sum_norm":
            sums = sums / self.length
        return sums.sum() / self.sequences


# What becomes of answers that come near the length limit, or are cut by it (DAPO; Yu et al. 2025).


class OverlongSection(Section):
    """The rewards by which advantages are measured; those that are logged, and that filters see, stay as they were."""

    buffer: int | None = Field(default=None, ge=1)
    """The length penalty begins this many tokens below the limit and grows with each token, an environment's included.
    Null: a fifth of `rollout.max_new_tokens`, as in the paper."""
    penalty: float = Field(default=1.0, ge=0.0)
    """The penalty of an answer at the limit."""
    filter: bool = False
    """Do not learn from truncated answers: their advantage is 0, they have no KL term and no entropy bonus, and the
    denominators stay."""
    limit: int | None = Field(default=None, ge=1)
    """The longest answer. Null: `rollout.max_new_tokens`."""

    def resolved(self, max_new_tokens: int) -> Self:
        limit = self.limit or max_new_tokens
        return self.model_copy(update={"limit": limit, "buffer": self.buffer or max(1, limit // 5)})

    def shaped(self, outcomes: Outcomes, lengths: Tensor) -> Outcomes:
        """Lower the rewards of long answers: + penalty · min(0, -(length - (limit - buffer)) / buffer).

        lengths: int64 [N], of the answers, stop tokens and an environment's tokens included.
        """
        assert self.limit is not None and self.buffer is not None, "not resolved"
        excess = (lengths - (self.limit - self.buffer)).clamp(0, self.buffer)
        return replace(outcomes, rewards=outcomes.rewards - self.penalty * excess / self.buffer)


# KL divergence from the model that the run started from, which keeps the policy near it: in the loss or in the reward.


Estimator = Literal["k2", "k3"]


def k2(x: Tensor) -> Tensor:
    """x² / 2"""
    return x.square() / 2


def k3(x: Tensor) -> Tensor:
    """e^-x - 1 + x, without its cancellation; x is clamped to ±20."""
    x = clamp_exponent(x)
    return (-x).expm1() + x


ESTIMATORS: dict[Estimator, Callable[[Tensor], Tensor]] = {"k2": k2, "k3": k3}


class KlLossSection(Section):
    """A term of the loss."""

    coefficient: float = Field(default=0.0, ge=0.0)
    """The loss of a token per nat of KL; 1e-3 to 1e-2 is usual. 0: no such term."""
    estimator: Estimator = "k2"
    """`k2` has the gradient of the KL, `k3` its value."""

    @field_validator("estimator", mode="before")
    @classmethod
    def _k1_teaches_nothing(cls, name: Any) -> Any:
        if name == "k1":
            raise ValueError(
                "found k1, expected k2 or k3: as a loss, k1 has a gradient whose mean is zero. Set estimator=k2, or "
                "put k1 into the reward with algorithm.kl.reward.coefficient"
            )
        return name


class KlRewardSection(Section):
    """A penalty on each token's reward, k1 of the weights that sampled it, subtracted before advantages are made."""

    coefficient: float = Field(default=0.0, ge=0.0)
    """The penalty on a token's reward per nat. 0: none."""


class KlSection(Section):
    """The reference is the model of `model.path`, frozen, in the trainer's own numerics and layout. It is loaded only
    where a coefficient is not 0."""

    loss: KlLossSection = KlLossSection()
    """The KL term of the loss."""
    reward: KlRewardSection = KlRewardSection()
    """The KL penalty in the reward."""

    @property
    def needs_reference(self) -> bool:
        """Return whether a reference is loaded."""
        return self.loss.coefficient > 0 or self.reward.coefficient > 0
