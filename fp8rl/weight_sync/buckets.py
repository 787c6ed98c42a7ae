"""Flat send buffers. The quantizer writes directly into a buffer, and a full buffer is sent as a single message."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fp8rl.models.tensors import EngineRank, TensorTable
from fp8rl.numerics.core.memory import Shared
from fp8rl.numerics.delta import LastSent, encode
from fp8rl.rollout.engine.protocol import DELTA

ALIGNMENT = 16
"""Alignment of tensors in bytes. A kernel stores 16 bytes at a time, and every dtype's size divides 16."""
SMALLEST_BYTES = 16 << 20
"""Bytes of the first bucket. Each further bucket is twice as large, up to the limit. Small models need little
memory."""

Named = tuple[str, Tensor]
Allocate = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
"""Makes an uninitialised, contiguous tensor."""
BucketEntry = tuple[str, str, list[int], int]
"""A tensor in a bucket, for an engine: HF name, torch's name of the dtype, shape, offset in bytes."""


@dataclasses.dataclass
class Bucket:
    """A send buffer while it is filled."""

    memory: Shared
    flat: Tensor
    """The memory in this process, uint8."""
    used: int = 0
    """Number of bytes of `flat` that are used."""
    pending: int = 0
    """Number of tensors that were allocated but not added yet."""
    entries: list[BucketEntry] = dataclasses.field(default_factory=list)
    """The tensors to send; there may be gaps between them."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Allocate a tensor in `flat`. Return None if too little of `flat` is left."""
        size = math.prod(shape) * dtype.itemsize
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        if start + size > len(self.flat):
            return None
        self.used = start + size
        self.pending += 1
        return self.flat[start : self.used].view(dtype).view(tuple(shape))

    def holds(self, tensor: Tensor) -> bool:
        """Return True if `allocate` made the tensor, and it is still contiguous in the bucket."""
        return tensor.is_contiguous() and tensor.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor of this bucket to the tensors to send, under this name."""
        self.pending -= 1
        start = int(tensor.storage_offset()) * tensor.element_size()
        self.entries.append((name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape], start))


class Packer:
    """Fills buckets of at most `limit` bytes. A larger tensor gets a bucket of its own.

    share: allocates memory of a size on a device. Memory is reused, so that few buckets exist at a time.
    loading: number of buckets that engines are still reading when the next bucket is requested.
    """

    def __init__(self, limit: int, share: Callable[[int, torch.device], Shared], loading: int = 0) -> None:
        self._limit, self._share, self._loading = limit, share, loading
        self._next_size = min(limit, SMALLEST_BYTES)
        self._open: list[Bucket] = []
        self._read: list[Bucket] = []
        self._spare: list[Bucket] = []

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a tensor in the bucket that is being filled, or in a new bucket if that bucket is full."""
        view = self._open[-1].allocate(shape, dtype) if self._open else None
        if view is None:
            self._open.append(self._bucket(math.prod(shape) * dtype.itemsize, device))
            view = self._open[-1].allocate(shape, dtype)
            assert view is not None
        return view

    def pack(self, tensors: Iterable[Named]) -> Iterator[Bucket]:
        """Yield buckets with all `tensors`. Tensors that `allocate` made must come in the order of allocation and are
        not copied; other tensors are copied.

        A bucket's memory may be overwritten after 1 + `loading` further buckets were requested.
        """
        for name, tensor in tensors:
            bucket = next((bucket for bucket in self._open if bucket.holds(tensor)), None)
            if bucket is None:
                copy = self.allocate(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
                self._open[-1].add(name, copy)
            else:
                bucket.add(name, tensor)
                while self._open[0] is not bucket:  # what is still pending there was lost on the way
                    yield from self._close()
            while len(self._open) > 1 and not self._open[0].pending:
                yield from self._close()
        while self._open:
            yield from self._close()

    def _close(self) -> Iterator[Bucket]:
        bucket = self._open.pop(0)
        if not bucket.entries:
            self._spare.append(bucket)
            return
        yield bucket
        self._read.append(bucket)
        self._spare += self._read[: len(self._read) - self._loading]
        del self._read[: len(self._read) - self._loading]

    def _bucket(self, size: int, device: torch.device) -> Bucket:
        wanted, self._next_size = max(size, self._next_size), min(self._limit, 2 * self._next_size)
        fitting = [spare for spare in self._spare if len(spare.flat) == wanted and spare.flat.device == device]
        self._spare.clear()
        if fitting:
            return Bucket(fitting[0].memory, fitting[0].flat)
        memory = self._share(wanted, device)
        return Bucket(memory, memory.own(writable=True))


# Sending only what has changed since the last sync, as deltas of bytes (`numerics.delta`).


def changes(
    last: LastSent, tensors: Iterable[Named], version: int, since: int | None, table: TensorTable, ranks: int
) -> Iterator[Named]:
    """Yield deltas between `tensors` (HF names) and the tensors sent last, for engines of `ranks` ranks.

    A tensor that has changed too much is sent whole. All tensors are sent whole if `since`, the engines' version, is
    not the version of `last`. Each delta covers the part of a tensor in one rank of an engine. Its name is the part's
    label. `last` is updated to `version`.
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
        deltas[DELTA + rank.label(name, row)] = delta  # one label, so one delta, if all ranks have it whole
    yield from deltas.items()
