"""The tokens that those of a batch were drawn from, where top-p, top-k or min-p left some out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.sampling import Truncation

NOT_CARRIED = 0
"""Place of a token whose support is found in the trainer's own logits."""


@dataclass(frozen=True)
class Supports:
    """The supports that tokens were drawn from when they were drawn, at weights which the trainer may have no more.

    Attributes:
        at: int64 [B, S] or of any other shape, each token's place in `pool`; `NOT_CARRIED` where there is none.
        pool: int32 [N]: at a token's place the number of ids, and then the ids. It begins with 0, that of no token.
    """

    at: Tensor
    pool: Tensor

    @classmethod
    def of(cls, carried: Tensor, counts: Tensor, ids: Tensor) -> Supports:
        """carried: bool [B, S]. counts: whole numbers [M], of these in row-major order. ids: likewise
        [counts.sum()]."""
        counts, ids = counts.int(), ids.int()
        starts = 1 + torch.arange(len(counts)) + counts.cumsum(0) - counts
        pool = torch.zeros(1 + len(counts) + len(ids), dtype=torch.int32)
        is_id = torch.ones(len(pool), dtype=torch.bool)
        is_id[0] = is_id[starts] = False
        pool[starts], pool[is_id] = counts, ids
        at = torch.full(carried.shape, NOT_CARRIED)
        at[carried] = starts
        return cls(at, pool)

    def followed_by(self, other: Supports) -> Supports:
        """These, then those of further rows."""
        moved = torch.where(other.at == NOT_CARRIED, NOT_CARRIED, other.at + len(self.pool))
        return Supports(torch.cat([self.at, moved]), torch.cat([self.pool, other.pool]))

    def kept(self, vocabulary: int) -> Tensor:
        """bool [n, V], where `at` is [n]: the tokens of each support."""
        counts = self.pool[self.at].long()
        row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        place = torch.arange(len(row), device=counts.device) - (counts.cumsum(0) - counts)[row]
        kept = torch.zeros(len(counts), vocabulary, dtype=torch.bool, device=counts.device)
        kept[row, self.pool[self.at[row] + 1 + place].long()] = True
        return kept


def left_out(
    logits: Tensor, temperature: float, truncation: Truncation, drawn: Tensor, supports: Supports | None
) -> Tensor:
    """bool [n, V], the tokens that those which follow logits [n, V] were not drawn from.

    drawn: bool [n], where one was. supports: of them, [n]; where it has none, or is None, these are found in the
    logits.
    """
    rows, device = len(logits), logits.device
    settings = (
        torch.full((rows,), truncation.top_p, device=device),
        torch.full((rows,), truncation.top_k, device=device),
        torch.full((rows,), truncation.min_p, device=device),
    )
    temperatures = torch.full((rows,), temperature, device=device)
    floors = ops.support_floors(logits, temperatures, *settings).masked_fill(~drawn, -torch.inf)
    out = logits < floors.unsqueeze(-1)
    if supports is not None:
        carried = (supports.at != NOT_CARRIED).nonzero().flatten()
        out[carried] = ~replace(supports, at=supports.at[carried]).kept(logits.shape[-1])
    return out
