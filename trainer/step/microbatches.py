"""How the rows of a batch fall into micro-batches and data-parallel ranks, each row padded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fp8rl.trainer import device
from fp8rl.trainer.modules.packing import PackedRows
from fp8rl.trainer.step.batch import TokenBatch


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch that go through the model together. Here each row is padded, and takes a row of the model's
    input; `trainer.step.packing` lays them end to end.

    Attributes:
        rows: their numbers in the whole batch. None, on a rank without rows for its turn: it takes part in the
            collectives, on one row that counts for nothing.
        batch: these rows, on the device.
        packed_rows: what attention must know of rows that lie end to end.
    """

    rows: list[int]
    batch: TokenBatch
    packed_rows: PackedRows | None = None

    @classmethod
    def of(cls, batch: TokenBatch, rows: list[int], multiple: int) -> MicroBatch:
        """These rows of `batch`, for a model that takes a multiple of tokens."""
        return cls(rows, pad_to_multiple(rows_of(batch, rows), multiple).to(device.current()))

    def laid(self, values: Tensor) -> Tensor:
        """Values of the batch's tokens [B, S, ...], as the model takes its tokens [b, s, ...]."""
        return values

    def by_row(self, values: Tensor, padding: int = 0) -> Tensor:
        """The other way round. padding: what stands there may be this, or anything."""
        return values


def plan(lengths: list[int], dp_size: int, budget: int, multiple: int = 1) -> list[list[list[int]]]:
    """Assign rows to ranks and micro-batches, the same on every rank and with equally many micro-batches on each.

    Rows of similar length share a micro-batch. A micro-batch holds at most `budget` padded tokens, or one longer row.
    A rank that has too few rows for its share gets empty micro-batches.

    Args:
        lengths: tokens of each row.
        budget: padded tokens of a micro-batch.
        multiple: rows are padded to a multiple of this.

    Returns:
        Row indices by rank, then micro-batch.
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    filled = [_fill(longest_first[rank::dp_size], lengths, budget, multiple) for rank in range(dp_size)]
    count = max(len(micro) for micro in filled)
    return [_split_to(micro, count) for micro in filled]


def rows_of(batch: TokenBatch, rows: list[int]) -> TokenBatch:
    """These rows; where there are none the shortest, so that the model has something to compute."""
    return batch.select(rows or [int(batch.lengths.argmin())])


def pad_to_multiple(batch: TokenBatch, multiple: int) -> TokenBatch:
    """The batch with its width padded to a multiple, as sequence parallelism and FP8 products need."""
    return batch.padded(-(-batch.width // multiple) * multiple)


def _fill(rows: list[int], lengths: list[int], budget: int, multiple: int) -> list[list[int]]:
    """Rows, longest first, into consecutive micro-batches within the budget."""
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
    """The same rows in `count` micro-batches: halve the one with most rows, then add empty ones."""
    micro = list(micro)
    while len(micro) < count:
        largest = max(range(len(micro)), key=lambda i: len(micro[i]), default=None)
        if largest is None or len(micro[largest]) < 2:
            micro.append([])
            continue
        rows = micro[largest]
        micro[largest : largest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return micro
