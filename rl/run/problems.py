"""Which items a step sees: shuffled anew each epoch, fixed by seed and step alone, so that a resumed run goes on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def of_step(items: Sequence[T], step: int, count: int, seed: int) -> list[T]:
    """`count` items for `step` (from 1). Every item is seen once before any is seen again."""
    chosen: list[T] = []
    first, last = (step - 1) * count, step * count
    for epoch in range(first // len(items), (last - 1) // len(items) + 1):
        start = epoch * len(items)
        order = _shuffled(len(items), epoch, seed)
        chosen += [items[i] for i in order[max(first - start, 0) : last - start]]
    return chosen


def nth(items: Sequence[T], number: int, seed: int) -> T:
    """The item that `of_step` gives at place `number`, from 0, of all steps in a row."""
    return of_step(items, number + 1, 1, seed)[0]


@functools.lru_cache(maxsize=4)
def _shuffled(count: int, epoch: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order
