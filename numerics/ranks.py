"""Collective actions of a trainer's ranks on Python values. A single process is alone in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def all_gathered(value: T) -> list[T]:
    """Return every rank's value, in rank order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def together(action: Callable[[], T]) -> list[T]:
    """Run `action` on each rank, and return all results in rank order.

    Raises on all ranks what it raises on one, so that nobody waits for a rank that has failed.
    """
    try:
        outcome: tuple[Any, Exception | None] = action(), None
    except Exception as error:
        outcome = None, error
    gathered = all_gathered(outcome)
    for _, failure in [outcome, *gathered]:  # its own first, which has the traceback
        if failure is not None:
            raise failure
    return [result for result, _ in gathered]


def exhaust(stream: Iterable[object]) -> None:
    """Take the rest of a stream that ranks make together: a rank that leaves early keeps the others waiting."""
    for _ in stream:
        pass
