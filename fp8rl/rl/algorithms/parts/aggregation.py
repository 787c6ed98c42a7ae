"""Aggregates the losses of tokens into one number, with the denominators of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

AggregationMode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


@dataclass(frozen=True)
class Aggregation:
    """A mean over the batch that adds up over rows, wherever they are computed.

    `token_mean`: every token counts the same (DAPO). `seq_mean_token_mean`: every sequence does (GRPO as published,
    GSPO). `seq_mean_token_sum`: so does every sequence, by the sum of its tokens. `seq_mean_token_sum_norm`: the same
    over a constant length, so that the length of an answer does not weigh its tokens (Dr. GRPO).
    """

    mode: AggregationMode
    tokens: int
    """Used tokens of the whole batch."""
    sequences: int
    """Rows of the whole batch with at least one used token."""
    length: int = 1
    """The length that `seq_mean_token_sum_norm` divides by."""

    @classmethod
    def of(cls, used: Tensor, mode: AggregationMode, length: int = 1) -> Aggregation:
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
