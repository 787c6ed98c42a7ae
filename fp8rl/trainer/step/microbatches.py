"""Assigns the rows of a batch to data-parallel ranks and micro-batches, padded or packed."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor

from fp8rl.trainer import device
from fp8rl.trainer.modules.rows import PackedRows, gathered, own_positions
from fp8rl.trainer.step.batch import TokenBatch


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch that go through the model together. In this class each row of the batch is a padded input row."""

    rows: list[int]
    """The rows' numbers in the whole batch. The list is empty on a rank without rows. `batch` then has one row that
    does not count, so that the rank takes part in the collectives."""
    batch: TokenBatch
    """The rows, on the device."""
    packed_rows: PackedRows | None = None
    """The layout of packed rows, for attention."""

    @classmethod
    def of(cls, batch: TokenBatch, rows: list[int], multiple: int) -> MicroBatch:
        """Build the micro-batch of these rows of `batch`. multiple: the padded length is a multiple of this number."""
        chosen = rows_of(batch, rows)
        return cls(rows, chosen.padded(-(-chosen.width // multiple) * multiple).to(device.current()))

    @classmethod
    def plan(cls, batch: TokenBatch, dp_size: int, budget: int, multiple: int) -> list[list[list[int]]]:
        """Assign the rows of `batch` to ranks and micro-batches, as the function `plan` does."""
        return plan(batch.lengths.tolist(), dp_size, budget, multiple)

    def to_model(self, values: Tensor) -> Tensor:
        """Put values [B, S, ...] of the batch into the order of the model's input [b, s, ...]."""
        return values

    def from_model(self, values: Tensor, padding: int = 0) -> Tensor:
        """Undo `to_model`. padding: the value for padded places, in layouts that fill them."""
        return values

    def real_in_model(self) -> Tensor:
        """Return bool [b, s], False in the padding of the model's input. All are False on a rank without rows."""
        return self.to_model(self.batch.real_tokens()) & bool(self.rows)

    def metrics(self) -> dict[str, Tensor]:
        """Return metrics of the layout. A pass sums them over its micro-batches."""
        return {}

    # A target is a token that the head predicts, from the hidden state of the token before it. Here every token has a
    # target, the one behind it in its row; behind a row's last one nobody asks for it.

    def predictors(self, hidden: Tensor) -> Tensor:
        """Return the hidden states [n, 1, H] that predict the targets. hidden: all hidden states [s, b, H]. Both are
        only this tensor-parallel rank's part."""
        return hidden.flatten(0, 1).unsqueeze(1)

    def targets_of(self, values: Tensor) -> Tensor:
        """Return the values of the targets of all tensor-parallel ranks, [N], one rank after another.

        values: [B, S], a value for each token of the batch.
        """
        return self.to_model(values.roll(-1, 1)).t().flatten()

    def from_targets(self, values: Tensor, padding: int = 0) -> Tensor:
        """Put values of the targets [N] back into rows, [B, S - 1], for tokens 1 to S - 1.

        padding: the value for padded places, in layouts that fill them.
        """
        in_model = self.to_model(self.batch.tokens).t()
        return self.from_model(values.view(in_model.shape).t(), padding)[:, :-1]


def plan(lengths: list[int], dp_size: int, budget: int, multiple: int = 1) -> list[list[list[int]]]:
    """Assign rows to ranks and micro-batches. Every rank computes the same plan and gets equally many micro-batches.

    Rows of similar length share a micro-batch. A micro-batch has at most `budget` tokens, padding to a multiple of
    `multiple` included, or one longer row. A rank with too few rows gets empty micro-batches.

    lengths: number of tokens of each row. The result has, for each rank and micro-batch, the numbers of the rows.
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    filled = [_fill(longest_first[rank::dp_size], lengths, budget, multiple) for rank in range(dp_size)]
    count = max(len(micro) for micro in filled)
    return [_split_to(micro, count) for micro in filled]


def rows_of(batch: TokenBatch, rows: list[int]) -> TokenBatch:
    """Return these rows of the batch. If there are none, return the shortest row, so that the model has an input."""
    return batch.select(rows or [int(batch.lengths.argmin())])


def _fill(rows: list[int], lengths: list[int], budget: int, multiple: int) -> list[list[int]]:
    """Cut rows into consecutive micro-batches within the budget. rows: longest first."""
    micro: list[list[int]] = []
    width = 0
    for row in rows:
        if micro and (len(micro[-1]) + 1) * width <= budget:
            micro[-1].append(row)
        else:
            width = -(-lengths[row] // multiple) * multiple
            micro.append([row])
    return micro


def _split_to(micro: list[list[int]], count: int) -> list[list[int]]:
    """Make `count` micro-batches. Halve the one with most rows again and again, then add empty micro-batches."""
    micro = list(micro)
    while len(micro) < count:
        largest = max(range(len(micro)), key=lambda i: len(micro[i]), default=None)
        if largest is None or len(micro[largest]) < 2:
            micro.append([])
            continue
        rows = micro[largest]
        micro[largest : largest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return micro


# Micro-batches of rows that are end to end: as many as have room, whatever their lengths.


@dataclass(frozen=True, kw_only=True)
class PackedMicroBatch(MicroBatch):
    """Rows of a batch that are end to end in one row of the model's input [1, T].

    The padding is an additional last row, which repeats the last token.
    """

    index: Tensor
    """int64 [T], for each input token its index in `batch.tokens.flatten()`."""
    real: int
    """Number of tokens that are no padding."""

    @classmethod
    def plan(cls, batch: TokenBatch, dp_size: int, budget: int, multiple: int) -> list[list[list[int]]]:
        return plan_packed(batch.lengths.tolist(), dp_size, budget, multiple)

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

    def to_model(self, values: Tensor) -> Tensor:
        return values.flatten(0, 1)[self.index][None]

    def real_in_model(self) -> Tensor:
        return (torch.arange(len(self.index), device=self.index.device) < self.real)[None] & bool(self.rows)

    def from_model(self, values: Tensor, padding: int = 0) -> Tensor:
        return self._placed(self.index[: self.real], values[0, : self.real], padding)

    def _placed(self, numbers: Tensor, values: Tensor, padding: int) -> Tensor:
        """Return [B, S, ...] with values[i] at the token numbers[i] of the batch, and `padding` at all other tokens."""
        shape = self.batch.tokens.shape
        whole = values.new_full((shape.numel(), *values.shape[1:]), padding)
        return whole.index_put((numbers,), values).unflatten(0, shape)


def plan_packed(lengths: list[int], dp_size: int, budget: int, multiple: int = 1) -> list[list[list[int]]]:
    """Assign packed rows to ranks and micro-batches, as `plan` does for padded rows.

    A micro-batch has at most `budget` tokens, or one longer row. It is padded at its end to a multiple. The number of
    micro-batches is the smallest that works if each row, longest first, goes to the micro-batch with fewest tokens.
    So micro-batches have about equal numbers of tokens.
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    room = max(budget // multiple, 1) * multiple
    alone, together = sum(2 * length > room for length in lengths), sum(min(length, room) for length in lengths)
    count = -(-max(alone, -(-together // room)) // dp_size)  # fewer have no room
    while (found := _spread(longest_first, lengths, count * dp_size, room)) is None:
        count += 1
    return [found[rank::dp_size] for rank in range(dp_size)]


def _spread(rows: list[int], lengths: list[int], count: int, room: int) -> list[list[int]] | None:
    """Spread rows over `count` micro-batches. Return the micro-batches, most tokens first, or None if a row does not
    fit. rows: longest first."""
    emptiest = [(0, place) for place in range(count)]
    micro: list[list[int]] = [[] for _ in range(count)]
    for row in rows:
        tokens, place = heapq.heappop(emptiest)
        if tokens and tokens + lengths[row] > room:
            return None
        micro[place].append(row)
        heapq.heappush(emptiest, (tokens + lengths[row], place))
    return [micro[place] for _, place in sorted(emptiest, key=lambda entry: (-entry[0], entry[1]))]


# Micro-batches whose rows are shared by context-parallel ranks: each has a part of every row's tokens.


@dataclass(frozen=True, kw_only=True)
class SharedMicroBatch(MicroBatch):
    """Padded rows that context-parallel ranks split. This rank's model gets the tokens at `positions` of each row.

    The ranks of a group gather the model's outputs. All of them compute the same loss of whole rows, and each takes the
    gradient of its own tokens.
    """

    positions: Tensor

    @classmethod
    def of(cls, batch: TokenBatch, rows: list[int], multiple: int) -> SharedMicroBatch:
        whole = MicroBatch.of(batch, rows, multiple).batch
        rank, ranks = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        return cls(rows, whole, positions=own_positions(whole.width, rank, ranks).to(whole.tokens.device))

    def to_model(self, values: Tensor) -> Tensor:
        return values[:, self.positions]

    def from_model(self, values: Tensor, padding: int = 0) -> Tensor:
        return gathered(values, parallel_state.get_context_parallel_group())
