"""Lets a trainer's ranks exchange Python values, and limits the time and the memory of code in a process.

A process that is not one of several ranks acts alone.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
"""The address at which processes of one machine reach each other."""


def rank() -> int:
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

    If `action` raises on a rank, all ranks raise, so that no rank waits for one that has failed.
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
    """Read the rest of a stream that all ranks produce together: if one rank stopped early, the others would wait."""
    for _ in stream:
        pass


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after this time. In other threads than the main thread it has no effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took more than {seconds:g} s")

    former = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


@contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Raise MemoryError in the block if the process would take more than `size` further bytes of address space."""
    former, most = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (min(used + size, former % (1 << 64)), most))  # -1 is no limit
    try:
        yield
    except MemoryError:
        raise MemoryError(f"it took more than {size >> 20} MiB") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (former, most))
