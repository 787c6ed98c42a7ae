"""Tensors packed end to end into flat buckets, so that a model of many tensors travels in few messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

Named = tuple[str, Tensor]


def buckets(tensors: Iterable[Named], limit: int) -> Iterator[list[Named]]:
    """Consecutive tensors, as many as stay within `limit` bytes; a larger tensor is a bucket of its own."""
    bucket: list[Named] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
