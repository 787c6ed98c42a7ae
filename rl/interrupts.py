"""Ctrl-C and SIGTERM end a run in one way: by unwinding it. Nothing cuts the unwinding short."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_DEAF_SECONDS = 1.0
"""How long further signals are ignored, for the first one to unwind to where the closing begins."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM, which `ray job stop` sends, raise KeyboardInterrupt as Ctrl-C does; a burst of both raises once."""
    last = float("-inf")

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last > _DEAF_SECONDS:
            last = time.monotonic()
            raise KeyboardInterrupt

    with _handling(interrupt):
        yield


class Closing(ExitStack):
    """An ExitStack that closes what it holds with both signals ignored."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _handling(signal.SIG_IGN):
            if kind is KeyboardInterrupt:
                print("interrupted: ending every process of the run", file=sys.stderr, flush=True)
            super().__exit__(kind, error, trace)


@contextmanager
def _handling(handler: object) -> Iterator[None]:
    previous = {signum: signal.signal(signum, handler) for signum in SIGNALS}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for signum, former in previous.items():
            signal.signal(signum, former)
