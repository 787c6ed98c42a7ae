"""Ends a run on Ctrl-C, SIGTERM and a closed terminal: the run is unwound. A second signal, some seconds later, cuts
the unwinding short.

Before a run has opened anything, and while modules are imported, a signal ends the process at once.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, ParamSpec, TypeVar

import psutil

from fp8rl.numerics.core.errors import say_error
from fp8rl.rollout.deadlines import kill_family

P = ParamSpec("P")
Result = TypeVar("Result")
Handler = Callable[[int, FrameType | None], None] | int | None

INTERRUPTED = 130
"""Exit code of an interrupted process, as in shells."""
STOPPED = 3
"""Exit code of a run that a gate, a loss that is not finite, or a failure (`restarts.FAILURES`) has stopped."""
_HANGUP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
"""SIGHUP, unless it is ignored already: under `nohup` a terminal may close."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, *_HANGUP)

_DEAF_SECONDS = 1.0
"""How long further signals are ignored, so that the first one can unwind to where the closing begins."""
_BURST_SECONDS = 2.0
"""Signals within this time of the first signal count as the same request. A later signal ends the process by force."""
_END_SECONDS = 180.0
"""Longest time in which one part of a run may close. Each part has a shorter deadline of its own, up to a minute."""
_LOOK_SECONDS = 0.1
"""Interval at which `ShutdownStack` checks whether a further signal has come."""
_AGAIN_SECONDS = 0.01
"""Delay after which an interrupt is raised again that Python could not pass on."""
_IGNORED: dict[signal.Signals, Handler] = dict.fromkeys((*SIGNALS, signal.SIGALRM), signal.SIG_IGN)
_ROOT = Path(__file__).parents[2]
_GONE_SECONDS = 5.0
"""Time within which killed processes are gone."""
_first = float("inf")
"""Monotonic time at which the first signal came in the present `interruptible` block."""
_posts: list[socket.socket] = []
"""The sockets to which Python writes each signal's number at once, one for each open `interruptible` block."""


def end_on_signal() -> None:
    """Have each signal end this process at once, until `interruptible` replaces the handlers."""

    def end(signum: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # of a terminal that is closed
            os.write(sys.stderr.fileno(), b"interrupted; nothing was started\n")
        os._exit(INTERRUPTED)

    _handle(dict.fromkeys(SIGNALS, end))


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM, which `ray job stop` sends, and SIGHUP raise KeyboardInterrupt as Ctrl-C does; a burst raises once.

    After an interrupt these signals stay ignored, since the process is about to end.
    """
    global _first
    last, former_hook = float("-inf"), sys.unraisablehook
    _first = float("inf")

    def again(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        """Raise an interrupt again that was lost in a finalizer or in a weak reference's callback."""
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
    """Return whether this process is about to end, or closes a run: a signal has come, or signals are ignored."""
    return any(map(_signals_in, _posts)) or all(
        signal.getsignal(signum) in (signal.SIG_IGN, _noted) for signum in SIGNALS
    )


def _leave_terminal() -> None:
    """Redirect output from a closed terminal to /dev/null, because each line written to it would raise an error."""
    with open(os.devnull, "wb") as nowhere:
        for descriptor in (1, 2):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere.fileno(), descriptor)


@contextmanager
def _posted() -> Iterator[None]:
    """Watch for signals in a thread, and end this process by force at a signal some seconds after the first. A handler
    in Python would wait for the main thread, which may be busy, or blocked in a library for ever."""
    post, sender = socket.socketpair()
    over = threading.Event()
    watching = threading.Thread(target=_watch, args=(post, over), name="signals", daemon=True)
    with post, sender:
        sender.setblocking(False)
        former = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        _posts.append(post)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # one that the thread took would not wake this one
        watching.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            yield
        finally:
            _posts.remove(post)
            signal.set_wakeup_fd(former)
            over.set()
            sender.close()  # which wakes it
            watching.join()


def _watch(post: socket.socket, over: threading.Event) -> None:
    global _first
    seen = 0
    post.recv(1, socket.MSG_PEEK)
    while not over.is_set():
        if (count := _signals_in(post)) > seen:
            seen, now = count, time.monotonic()
            _first = min(_first, now)
            if now - _first > _BURST_SECONDS:
                end_by_force("interrupted again: the end of the run is cut short", INTERRUPTED)
        over.wait(_LOOK_SECONDS)


def _signals_in(post: socket.socket) -> int:
    """Return how many signals have come to the socket, without taking them from it."""
    try:
        return sum(signum in SIGNALS for signum in post.recv(4096, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return 0


class ShutdownStack(ExitStack):
    """An ExitStack that signals do not interrupt while it closes, except that a late one ends the process. outer:
    another `ShutdownStack` inside it announces the closing."""

    def __init__(self, *, outer: bool = False) -> None:
        super().__init__()
        self._outer = outer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        former = _handle({**dict.fromkeys(SIGNALS, _noted), signal.SIGALRM: signal.SIG_IGN})
        for signum in SIGNALS:
            signal.siginterrupt(signum, False)  # no library has to bear it
        try:
            if kind is KeyboardInterrupt and not self._outer:
                say_error("interrupted: ending every process of the run")
            with _posted():
                super().__exit__(kind, error, trace)
        finally:
            _handle(former)

    def callback(self, callback: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs) -> Callable[P, Result]:
        """Have `callback` called when the stack closes, within a bounded time."""
        what = getattr(callback, "__qualname__", repr(callback))
        return super().callback(bounded(what, _END_SECONDS)(callback), *args, **kwargs)


def _noted(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the thread of `_posted` has the signal's number, and works while the main thread is blocked."""


def _handle(handlers: dict[signal.Signals, Handler]) -> dict[signal.Signals, Handler]:
    """Install signal handlers, and return the former ones."""
    return {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}


# What takes too long to end is ended by force.


@contextmanager
def bounded(what: str, seconds: float) -> Iterator[None]:
    """End this process by force if the block takes longer than `seconds`. what: what the block waits for."""
    over = threading.Event()

    def watch() -> None:
        if not over.wait(seconds):
            end_by_force(f"error: found {what} not ended after {seconds:g} s", STOPPED)

    threading.Thread(target=watch, name="deadline", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def exit_within(seconds: float, code: int) -> None:
    """End this process, whose work is done, within `seconds`: a thread that a user's function has left would keep it
    alive for ever."""

    def watch() -> None:
        threading.Event().wait(seconds)
        left = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
        end_by_force(f"found {', '.join(left) or 'this process'} not ended {seconds:g} s after all else", code)

    threading.Thread(target=watch, name="exit", daemon=True).start()


def end_by_force(why: str, code: int) -> NoReturn:
    """Print why, and the main thread's stack; kill all processes that this one has started; exit with `code`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    ours = [line for line in stack if Path(line.filename).is_relative_to(_ROOT) and ".venv" not in line.filename]
    at = "".join(
        f", at {Path(each.filename).relative_to(_ROOT.parent)}:{each.lineno} in {each.name}" for each in ours[-1:]
    )
    os.write(2, f"{why}{at}: killing every process that was started\n".encode())  # a stream may be locked
    psutil.wait_procs(kill_family(os.getpid(), itself=False), timeout=_GONE_SECONDS)
    os._exit(code)
