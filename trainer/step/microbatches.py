"""How the rows of a batch fall into micro-batches and data-parallel ranks."""

from __future__ import annotations

from trainer.step.batch import TokenBatch


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
