"""Overlong answers: the penalty near the length limit, and the filter of truncated ones (DAPO; Yu et al. 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from pydantic import Field
from torch import Tensor

from fp8rl.numerics.core.section import Section
from fp8rl.rl.algorithms.base import Outcomes


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
