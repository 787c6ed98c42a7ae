"""Runs a command in a child process. It passes signals on, kills what does not end, and starts a lost run again.

It imports little, because the start of every long command waits for it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

from fp8rl.rl.run.interrupts import INTERRUPTED, LOST, SAYS, SIGNALS, STOPPED
from fp8rl.rollout.tasks.environments.supervisor import DEATH_SIGNAL, SUBREAPER, kill_children, prctl, reaped

_BURST_SECONDS = 2.0
"""Signals within this time of the first signal count as the same request. A later signal kills the command."""
_CLOSING_SECONDS = 300.0
"""Longest time in which a command may end after a signal."""
_AGAIN_SECONDS = 10.0
"""Interval at which a signal is sent again: a library may have swallowed the KeyboardInterrupt."""
_LEFT_SECONDS = 5.0
"""Longest time that processes left behind by a command may take to end."""

restarts: int | None = None
"""How often the command of this process was started before; None: this process is not supervised."""


def supervise() -> None:
    """Go on in a child process, which is started again when it ends with `LOST`. This process exits as the child does.

    The child has a process group of its own, so that a Ctrl-C reaches it through this process alone.
    """
    global restarts
    prctl(SUBREAPER, 1)  # what the command leaves behind becomes a child of this process
    watched = {*SIGNALS, signal.SIGCHLD}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under `nohup` a terminal may close
        watched.remove(signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*watched, *SAYS.values()})  # each is taken by sigtimedwait
    code, started = LOST, 0
    while code == LOST:
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            prctl(DEATH_SIGNAL, signal.SIGKILL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a terminal would stop a background process that reads
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {*watched, *SAYS.values()})
            restarts = started
            return
        code = _ended(child, watched)
        if (said := signal.sigtimedwait(SAYS.values(), 0)) and code == 1:
            code = LOST if said.si_signo == SAYS[LOST] else STOPPED
        kill_children(_LEFT_SECONDS)
        started += 1
    sys.exit(code)


def end_with_parent() -> None:
    """Have this process get SIGTERM when the thread that started it ends."""
    prctl(DEATH_SIGNAL, signal.SIGTERM)


def _ended(child: int, watched: set[signal.Signals]) -> int:
    """Pass signals on until the child ends; return its exit code. A child that does not end is killed."""
    first, sent, passed_on = 0.0, float("-inf"), 0
    while (code := reaped().get(child)) is None:
        came = signal.sigtimedwait(watched, 1.0)
        now = time.monotonic()
        signalled = came is not None and came.si_signo != signal.SIGCHLD
        if signalled and not first:
            first, passed_on = now, came.si_signo  # type: ignore[union-attr]
        if first and ((signalled and now - first > _BURST_SECONDS) or now - first > _CLOSING_SECONDS):
            why = "interrupted again" if signalled else f"found no end within {_CLOSING_SECONDS:g} s of the signal"
            _say(f"{why}: killing every process that was started")
            kill_children()
            return INTERRUPTED
        if first and now - sent > _AGAIN_SECONDS:
            os.kill(child, passed_on)
            sent = now
    if code < 0 and not first:
        name = signal.Signals(-code).name
        _say(f"error: found the command's process ended by {name}, expected it to end by itself. Is memory short?")
    return code if code >= 0 else 128 - code


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal is closed
        os.write(2, f"{text}\n".encode())
