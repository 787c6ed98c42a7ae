"""Raises KeyboardInterrupt for a signal, and closes what was opened, each part within a bounded time."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from fp8rl.numerics.core.errors import say_error

P = ParamSpec("P")
Result = TypeVar("Result")

INTERRUPTED = 130
"""Exit code of an interrupted process, as in shells."""
STOPPED = 3
"""Exit code of a run that a gate, a loss that is not finite, or a failure (`ending.FAILURES`) has stopped."""
LOST = 75
"""Exit code of a run that a resume can continue, such as after the loss of its trainer (EX_TEMPFAIL of sysexits.h)."""
SAYS = {LOST: signal.SIGUSR1, STOPPED: signal.SIGUSR2}
"""Signals that tell the supervisor the code with which a run without Ray ends: Ray may end it first, with code 1."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_END_SECONDS = 180.0
"""Longest time in which one part of a run may close. Each part has a shorter deadline of its own, up to a minute."""


def end_on_signal() -> None:
    """Have each signal end this process at once, until `interruptible` replaces the handlers."""

    def end(signum: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # of a terminal that is closed
            os.write(sys.stderr.fileno(), b"interrupted; nothing was started\n")
        os._exit(INTERRUPTED)

    _handle(end)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM, which `ray job stop` sends, and SIGHUP raise KeyboardInterrupt as Ctrl-C does.

    After an interrupt these signals are ignored, since the process is about to end.
    """

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:  # each line that is written to the closed terminal would raise an error
            with open(os.devnull, "wb") as nowhere:
                for descriptor in (1, 2):
                    if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                        os.dup2(nowhere.fileno(), descriptor)
        raise KeyboardInterrupt

    former = {signum: signal.getsignal(signum) for signum in SIGNALS}
    _handle(interrupt)
    try:
        yield
    except KeyboardInterrupt:
        former = dict.fromkeys(SIGNALS, signal.SIG_IGN)
        raise
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)


class BoundedExitStack(ExitStack):
    """An ExitStack whose callbacks have a bounded time, and which signals do not interrupt while it closes."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is KeyboardInterrupt and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            say_error("interrupted: ending every process of the run")
        former = {signum: signal.signal(signum, signal.SIG_IGN) for signum in SIGNALS}
        try:
            super().__exit__(kind, error, trace)
        finally:
            for signum, handler in former.items() if kind is not KeyboardInterrupt else ():
                signal.signal(signum, handler)

    def callback(self, callback: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs) -> Callable[P, Result]:
        """Have `callback` called when the stack closes, within a bounded time."""
        return super().callback(
            bounded(getattr(callback, "__qualname__", "a part"), _END_SECONDS)(callback), *args, **kwargs
        )


@contextmanager
def bounded(what: str, seconds: float) -> Iterator[None]:
    """End this process if the block takes longer; its supervisor kills the rest. what: what the block waits for."""

    def give_up() -> None:
        os.write(2, f"error: found {what} not ended after {seconds:g} s: it is given up\n".encode())
        os._exit(STOPPED)

    watch = threading.Timer(seconds, give_up)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def _handle(handler: Callable[[int, FrameType | None], None]) -> None:
    for signum in SIGNALS:
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # `nohup` sets that
            signal.signal(signum, handler)
