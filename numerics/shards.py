"""A stream of tensors in groups of limited size: files of a checkpoint, batches for a kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class Sized(Protocol):
    """A tensor of any kind."""

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


def shards(tensors: Iterable[tuple[str, T]], limit: int) -> Iterator[list[tuple[str, T]]]:
    """Consecutive tensors, as many as stay within `limit` bytes; a larger tensor is a shard of its own."""
    shard: list[tuple[str, T]] = []
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append((name, tensor))
        size += tensor.nbytes
    if shard:
        yield shard
