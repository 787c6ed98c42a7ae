"""Shards: order kept, filled up to the limit, and a larger tensor alone."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.numerics.holdings import shards

LIMIT = 100


def named(sizes: list[int]) -> list[tuple[str, torch.Tensor]]:
    return [(str(index), torch.zeros(size, dtype=torch.uint8)) for index, size in enumerate(sizes)]


def sizes_of(sizes: list[int]) -> list[list[int]]:
    return [[tensor.nbytes for _, tensor in shard] for shard in shards(named(sizes), LIMIT)]


def test_by_hand() -> None:
    assert sizes_of([]) == []
    assert sizes_of([60, 40, 1, 99, 1]) == [[60, 40], [1, 99], [1]]
    assert sizes_of([10, 250, 10, 20]) == [[10], [250], [10, 20]]
    assert sizes_of([250]) == [[250]]
    assert sizes_of([0, 100, 0]) == [[0, 100, 0]]


def test_bytes_count_and_not_elements() -> None:
    tensors = [("a", torch.zeros(20)), ("b", torch.zeros(10, dtype=torch.bfloat16)), ("c", torch.zeros(1))]
    assert [[name for name, _ in shard] for shard in shards(tensors, LIMIT)] == [["a", "b"], ["c"]]


@given(st.lists(st.integers(0, 130)))
def test_every_tensor_once_in_order_and_no_shard_that_could_have_taken_the_next(sizes: list[int]) -> None:
    packed = list(shards(named(sizes), LIMIT))
    assert [name for shard in packed for name, _ in shard] == [str(index) for index in range(len(sizes))]
    totals = sizes_of(sizes)
    assert all(sum(shard) <= LIMIT or len(shard) == 1 for shard in totals)
    assert all(sum(shard) + after[0] > LIMIT for shard, after in itertools.pairwise(totals))


def test_tensors_are_taken_one_shard_at_a_time() -> None:
    """A model larger than memory streams: nothing is read before the shard that it belongs to is asked for."""
    taken: list[str] = []

    def stream():  # type: ignore[no-untyped-def]
        for name, tensor in named([60, 60, 60]):
            taken.append(name)
            yield name, tensor

    packed = shards(stream(), LIMIT)
    next(packed)
    assert taken == ["0", "1"]
