"""The tokens that a batch's tokens were drawn from, where top-p, top-k or min-p left some out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.sampling import Truncation

NOT_CARRIED = 0
"""The `at` of a token without an entry in the pool. Its kept tokens are computed from the trainer's own logits."""


@dataclass(frozen=True)
class KeptTokenPool:
    """The tokens that truncation kept for each draw, for draws with weights that the trainer may no longer have."""

    at: Tensor
    """int64, usually [B, S]: where each token's entry in `pool` begins, or `NOT_CARRIED` if the token has no entry."""
    pool: Tensor
    """int32 [N]. An entry is the number of kept ids, then the ids. The first entry is empty, for `NOT_CARRIED`."""

    @classmethod
    def of(cls, carried: Tensor, counts: Tensor, ids: Tensor) -> KeptTokenPool:
        """Build the pool. carried: bool [B, S], True for tokens with an entry. counts: [M], the number of kept ids for
        each token with an entry, in row-major order. ids: [counts.sum()], their kept ids, in the same order."""
        counts, ids = counts.int(), ids.int()
        starts = 1 + torch.arange(len(counts)) + counts.cumsum(0) - counts
        pool = torch.zeros(1 + len(counts) + len(ids), dtype=torch.int32)
        is_id = torch.ones(len(pool), dtype=torch.bool)
        is_id[0] = is_id[starts] = False
        pool[starts], pool[is_id] = counts, ids
        at = torch.full(carried.shape, NOT_CARRIED)
        at[carried] = starts
        return cls(at, pool)

    def followed_by(self, other: KeptTokenPool) -> KeptTokenPool:
        """Append the pool of more rows."""
        moved = torch.where(other.at == NOT_CARRIED, NOT_CARRIED, other.at + len(self.pool))
        return KeptTokenPool(torch.cat([self.at, moved]), torch.cat([self.pool, other.pool]))

    def kept(self, vocabulary: int) -> Tensor:
        """Return bool [n, V], True for each token's kept ids. `at` must be [n]."""
        counts = self.pool[self.at].long()
        row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        place = torch.arange(len(row), device=counts.device) - (counts.cumsum(0) - counts)[row]
        kept = torch.zeros(len(counts), vocabulary, dtype=torch.bool, device=counts.device)
        kept[row, self.pool[self.at[row] + 1 + place].long()] = True
        return kept


def left_out(
    logits: Tensor, temperature: float, truncation: Truncation, drawn: Tensor, supports: KeptTokenPool | None
) -> Tensor:
    """Return bool [n, V], True for the ids that truncation left out, at each position of logits [n, V].

    drawn: bool [n], True if the token after the position was drawn. supports: [n], the ids that were kept for that
    token. If it has no entry, or if supports is None, truncation is applied to the logits.
    """
    settings = (temperature, truncation.top_p, truncation.top_k, truncation.min_p)
    of_rows = (torch.full((len(logits),), setting, device=logits.device) for setting in settings)
    floors = ops.truncation_floors(logits, *of_rows).masked_fill(~drawn, -torch.inf)
    out = logits < floors.unsqueeze(-1)
    if supports is not None:
        carried = (supports.at != NOT_CARRIED).nonzero().flatten()
        out[carried] = ~replace(supports, at=supports.at[carried]).kept(logits.shape[-1])
    return out
