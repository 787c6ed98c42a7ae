"""Signal handlers that come back after each test: commands install their own."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from fp8rl.rl.run.interrupts import SIGNALS


@pytest.fixture(autouse=True)
def handlers() -> Iterator[list[object]]:
    """The handlers before the test, which come back after it."""
    before = [signal.getsignal(signum) for signum in SIGNALS]
    yield before
    for signum, handler in zip(SIGNALS, before, strict=True):
        signal.signal(signum, handler)
