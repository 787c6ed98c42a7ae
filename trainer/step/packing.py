"""Micro-batches of rows that lie end to end: as many as have room, whatever their lengths."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.trainer import device
from fp8rl.trainer.modules.packing import PackedRows
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.microbatches import MicroBatch, rows_of


@dataclass(frozen=True, kw_only=True)
class PackedMicroBatch(MicroBatch):
    """Rows end to end in one row of the model's input [1, T], which is padded at its end alone: a last row of its own,
    in which the last token is repeated.

    Attributes:
        index: int64 [T], which of the B * S tokens of `batch` stands there.
        real: tokens that are no padding.
    """

    index: Tensor
    real: int

    @classmethod
    def of(cls, batch: TokenBatch, rows: list[int], multiple: int) -> PackedMicroBatch:
        chosen = rows_of(batch, rows)
        index = chosen.real_tokens().flatten().nonzero()[:, 0]
        real, lengths = len(index), chosen.lengths
        if padding := -real % multiple:
            index = torch.cat([index, index[-1:].expand(padding)])
            lengths = torch.cat([lengths, torch.tensor([padding])])
        here = device.current()
        return cls(rows, chosen.to(here), PackedRows.of(lengths), index=index.to(here), real=real)

    def laid(self, values: Tensor) -> Tensor:
        return values.flatten(0, 1)[self.index][None]

    def by_row(self, values: Tensor, padding: int = 0) -> Tensor:
        shape = self.batch.tokens.shape
        whole = values.new_full((shape.numel(), *values.shape[2:]), padding)
        return whole.index_put((self.index[: self.real],), values[0, : self.real]).unflatten(0, shape)


def plan_packed(lengths: list[int], dp_size: int, budget: int, multiple: int = 1) -> list[list[list[int]]]:
    """Like `trainer.step.microbatches.plan`, for rows that lie end to end: a micro-batch holds at most `budget` tokens,
    padded at its end to a multiple, or one longer row.

    All micro-batches of all ranks have about the same number of tokens: the longest row that is left joins the
    emptiest of them, and there are as few as that takes.
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    room = max(budget // multiple, 1) * multiple
    alone, together = sum(2 * length > room for length in lengths), sum(min(length, room) for length in lengths)
    count = -(-max(alone, -(-together // room)) // dp_size)  # fewer have no room
    while (found := _spread(longest_first, lengths, count * dp_size, room)) is None:
        count += 1
    return [found[rank::dp_size] for rank in range(dp_size)]


def _spread(rows: list[int], lengths: list[int], count: int, room: int) -> list[list[int]] | None:
    """Rows, longest first, in so many micro-batches, those with most tokens first; None if they have no room."""
    emptiest = [(0, place) for place in range(count)]
    micro: list[list[int]] = [[] for _ in range(count)]
    for row in rows:
        tokens, place = heapq.heappop(emptiest)
        if tokens and tokens + lengths[row] > room:
            return None
        micro[place].append(row)
        heapq.heappush(emptiest, (tokens + lengths[row], place))
    return [micro[place] for _, place in sorted(emptiest, key=lambda each: (-each[0], each[1]))]
