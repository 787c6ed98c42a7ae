"""Sending only what has changed since the last sync, as deltas of bytes (`numerics.delta`)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from models.tensors import EngineRank, TensorTable
from numerics.delta import encode
from rollout.protocol import DELTA

Named = tuple[str, Tensor]


class Sender:
    """What one trainer rank has sent, in a copy: the next sync sends the difference."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._sent: dict[str, Tensor] = {}

    def changes(
        self, tensors: Iterable[Named], version: int, since: int | None, table: TensorTable, ranks: int
    ) -> Iterator[Named]:
        """What to send for `tensors` (HF names) to engines of `ranks` ranks: deltas, or a tensor itself where it has
        changed too much, and all of them where the engines hold another version (`since`) than was last sent.

        A delta is of what one rank of an engine holds, and is named by its label.
        """
        usable = since is not None and since == self._version
        self._version = None  # until all of it is through
        for name, tensor in tensors:
            former = self._sent.get(name) if usable else None
            yield from self._change(name, tensor, former, table, ranks)
            if name in self._sent:
                self._sent[name].copy_(tensor)
            else:
                self._sent[name] = tensor.clone()
        self._version = version

    @staticmethod
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


_SENDERS: weakref.WeakKeyDictionary[Any, Sender] = weakref.WeakKeyDictionary()


def sender_of(trainer: Any) -> Sender:
    """Of this rank, from one sync to the next."""
    return _SENDERS.setdefault(trainer, Sender())
