"""Sending only what has changed since the last sync, as deltas of bytes (`numerics.delta`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from fp8rl.models.tensors import EngineRank, TensorTable
from fp8rl.numerics.delta import LastSent, encode
from fp8rl.rollout.protocol import DELTA
from fp8rl.weight_sync.buckets import Named


def changes(
    last: LastSent, tensors: Iterable[Named], version: int, since: int | None, table: TensorTable, ranks: int
) -> Iterator[Named]:
    """Yield what to send for `tensors` (HF names) to engines of `ranks` ranks: deltas to what was sent last, or a
    tensor itself where it has changed too much, and all of them where the engines hold another version (`since`).

    A delta is of what one rank of an engine holds, and is named by its label. last: is brought up to `version`.
    """
    usable = since is not None and since == last.version
    last.version = None  # until all of it is through
    for name, tensor in tensors:
        former = last.tensors.get(name)
        yield from _change(name, tensor, former if usable else None, table, ranks)
        if former is None:
            last.tensors[name] = tensor.clone()
        else:
            former.copy_(tensor)
    last.version = version


def _change(name: str, tensor: Tensor, former: Tensor | None, table: TensorTable, ranks: int) -> Iterator[Named]:
    if former is None:
        yield name, tensor
        return
    row, deltas = table[name], {}
    for rank in (EngineRank(rank, ranks) for rank in range(ranks)):
        new, old = (rank.part(row, whole).contiguous() for whole in (tensor, former))
        if (delta := encode(new, old)) is None:
            yield name, tensor
            return
        deltas[DELTA + rank.label(name, row)] = delta  # of what every rank has whole, once
    yield from deltas.items()
