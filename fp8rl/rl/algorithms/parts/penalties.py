"""Penalties for KL divergence from the model that the run started from (in the loss or in the reward), and for overlong
answers (a lower reward near the length limit, or a filter: DAPO; Yu et al. 2025)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, field_validator
from torch import Tensor

from fp8rl.numerics.core.section import Section
from fp8rl.rl.algorithms.base import Outcomes
from fp8rl.rl.mismatch.logprobs import clamp_exponent

Estimator = Literal["k2", "k3"]


def k3(x: Tensor) -> Tensor:
    """e^-x - 1 + x, without its cancellation; x is clamped to ±20."""
    x = clamp_exponent(x)
    return (-x).expm1() + x


ESTIMATORS: dict[Estimator, Callable[[Tensor], Tensor]] = {"k2": lambda x: x.square() / 2, "k3": k3}


class KlLossSection(Section):
    """The KL term of the loss."""

    coefficient: float = Field(default=0.0, ge=0.0)
    """The factor of the KL, in nats, in a token's loss; 1e-3 to 1e-2 is usual. 0: no KL term."""
    estimator: Estimator = "k2"
    """`k2` has the gradient of the KL. `k3` has the value of the KL."""

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
    """The KL penalty on each token's reward: the estimator k1 = logprob - reference logprob, at the weights that
    sampled the token. It is subtracted before advantages are computed."""

    coefficient: float = Field(default=0.0, ge=0.0)
    """The factor of logprob - reference logprob, in nats, that is subtracted from a token's reward. 0: no penalty."""


class KlSection(Section):
    """KL penalties against a reference: the model of `model.path`, frozen, in the trainer's own numerics and layout. It
    is loaded only if a coefficient is not 0."""

    loss: KlLossSection = KlLossSection()
    """The KL term of the loss."""
    reward: KlRewardSection = KlRewardSection()
    """The KL penalty in the reward."""


class OverlongSection(Section):
    """Treatment of overlong answers. It changes the rewards that advantages are computed from, not the rewards that are
    logged or that group filters see."""

    buffer: int | None = Field(default=None, ge=1)
    """Number of tokens before the limit at which the length penalty begins. The penalty grows with each token, also an
    environment's. Null: a fifth of `limit`, as in the paper."""
    penalty: float = Field(default=1.0, ge=0.0)
    """The penalty of an answer at the limit."""
    filter: bool = False
    """True: truncated answers are not trained on. Their advantage is 0, and they have no KL term and no entropy bonus.
    The loss's denominators still count their tokens."""
    limit: int | None = Field(default=None, ge=1)
    """The limit in tokens. Null: `rollout.max_new_tokens`."""

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
