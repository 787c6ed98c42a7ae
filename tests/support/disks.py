"""Disks that fill up."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def room(size: int) -> Iterator[None]:
    """Lets no file of this process pass `size` bytes, as a disk that fills up does."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:  # within the test: pytest's own output may go to a longer file
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
