"""How the rows of a batch fall into micro-batches and data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trainer import device
from trainer.step.batch import TokenBatch
from trainer.step.reading import Read


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch that go through the model together. Here each row is padded, and takes a row of the model's
    input; rows that are laid end to end would be packed and unpacked by another form of this type.

    Attributes:
        rows: their numbers in the whole batch. None, on a rank without rows for its turn: it takes part in the
            collectives, on one row that counts for nothing.
        batch: these rows, on the device.
    """

    rows: list[int]
    batch: TokenBatch

    @classmethod
    def of(cls, batch: TokenBatch, rows: list[int], multiple: int) -> MicroBatch:
        """These rows of `batch`, padded to a multiple."""
        selected = pad_to_multiple(batch.select(rows or [int(batch.lengths.argmin())]), multiple)
        return cls(rows, selected.to(device.current()))

    def packed(self) -> Tensor:
        """The tokens int64 [B, S] as the model is run on them."""
        return self.batch.tokens

    def unpacked(self, read: Read) -> Read:
        """What was read of the packed tokens, row by row as `batch` has them."""
        return read


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
    packed = [_pack(longest_first[rank::dp_size], lengths, budget, multiple) for rank in range(dp_size)]
    count = max(len(micro) for micro in packed)
    return [_split_to(micro, count) for micro in packed]


def pad_to_multiple(batch: TokenBatch, multiple: int) -> TokenBatch:
    """The batch with its width padded to a multiple, as sequence parallelism and FP8 products need."""
    return batch.padded(-(-batch.width // multiple) * multiple)


def _pack(rows: list[int], lengths: list[int], budget: int, multiple: int) -> list[list[int]]:
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
