"""Ctrl-C, SIGTERM and a closed terminal end a run in one way: by unwinding it. Nothing cuts the unwinding short.

Before anything is open there is nothing to unwind, and imports are the worst place to be interrupted in: the process
ends at once.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType, TracebackType

from numerics.io.terminal import say_error

Handler = Callable[[int, FrameType | None], None] | int | None

INTERRUPTED = 130
"""Exit code of what was interrupted, as shells have it."""
_HANGUP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
"""Under `nohup` a terminal may close."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, *_HANGUP)

_DEAF_SECONDS = 1.0
"""How long further signals are ignored, for the first one to unwind to where the closing begins."""
_AGAIN_SECONDS = 0.01
"""After how long an interrupt is raised again where Python could not pass it on."""
_IGNORED: dict[signal.Signals, Handler] = dict.fromkeys((*SIGNALS, signal.SIGALRM), signal.SIG_IGN)
_posts: list[socket.socket] = []
"""Where the numbers of signals arrive at once, of every block that is interruptible now."""


def end_on_signal() -> None:
    """Have each signal end this process on the spot, until something is opened that has to be closed."""

    def end(signum: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # of a terminal that is closed
            os.write(sys.stderr.fileno(), b"interrupted; nothing was started\n")
        os._exit(INTERRUPTED)

    _handle(dict.fromkeys(SIGNALS, end))


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM, which `ray job stop` sends, and SIGHUP raise KeyboardInterrupt as Ctrl-C does; a burst raises once.

    After an interrupt all of them stay ignored, since the process is about to end.
    """
    last, former_hook = float("-inf"), sys.unraisablehook

    def again(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        """Raise an interrupt again that came while Python was in a finalizer or a weak reference's callback."""
        if issubclass(lost.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
        else:
            former_hook(lost)

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal last
        if signum == signal.SIGHUP:
            _leave_terminal()
        if time.monotonic() - last > _DEAF_SECONDS:
            last = time.monotonic()
            raise KeyboardInterrupt

    with _posted():
        former = _handle({**dict.fromkeys(SIGNALS, interrupt), signal.SIGALRM: again})
        sys.unraisablehook = unraisable
        try:
            try:
                yield
            finally:
                sys.unraisablehook = former_hook
                signal.setitimer(signal.ITIMER_REAL, 0.0)  # without its handler it would end the process
        except KeyboardInterrupt:
            _handle(_IGNORED)
            raise
        except BaseException:
            _handle(former)
            raise
        else:
            _handle(former)


def is_ending() -> bool:
    """Whether this process is about to end, or closes a run: a signal has come, or they do nothing any more."""
    return any(map(_holds_signal, _posts)) or all(signal.getsignal(signum) is signal.SIG_IGN for signum in SIGNALS)


def _leave_terminal() -> None:
    """Write to nowhere what would go to a terminal that is closed; each line would be an error of its own."""
    with open(os.devnull, "wb") as nowhere:
        for descriptor in (1, 2):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere.fileno(), descriptor)


@contextmanager
def _posted() -> Iterator[None]:
    """Have signals noted as they come. A handler in Python waits for the main thread, which may be busy elsewhere."""
    post, sender = socket.socketpair()
    with post, sender:
        sender.setblocking(False)
        former = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        _posts.append(post)
        try:
            yield
        finally:
            _posts.remove(post)
            signal.set_wakeup_fd(former)


def _holds_signal(post: socket.socket) -> bool:
    try:
        came = post.recv(4096, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return any(signum in came for signum in SIGNALS)


class Closing(ExitStack):
    """An ExitStack that closes what it holds with all signals ignored. outer: another one inside says that it does."""

    def __init__(self, *, outer: bool = False) -> None:
        super().__init__()
        self._outer = outer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        former = _handle(_IGNORED)
        try:
            if kind is KeyboardInterrupt and not self._outer:
                say_error("interrupted: ending every process of the run")
            super().__exit__(kind, error, trace)
        finally:
            _handle(former)


def _handle(handlers: dict[signal.Signals, Handler]) -> dict[signal.Signals, Handler]:
    """Install them; the former ones."""
    return {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
