"""Runs a user's command in a process, and ends every process that the command has started.

It imports only the standard library. It ends the command when it gets SIGTERM or when its owner dies. It exits with
the command's status or, if a signal ended the command, with 128 plus the signal's number.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

COMMAND = (sys.executable, "-I", "-S", __file__)
"""The beginning of this program's command line. The command that it supervises follows."""

DEATH_SIGNAL, SUBREAPER = 1, 36
"""Of prctl(2): the signal that this process gets when its parent dies, and whether it adopts orphans."""
_libc = ctypes.CDLL(None, use_errno=True)


def main(command: list[str]) -> None:
    prctl(DEATH_SIGNAL, signal.SIGTERM)
    prctl(SUBREAPER, 1)  # what is left behind becomes a child of this process
    child = os.fork()
    if not child:
        os.setsid()
        prctl(DEATH_SIGNAL, signal.SIGKILL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)

    def end(*_: object) -> None:
        _kill_all(child)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    _, status = os.waitpid(child, 0)
    _kill_all(child)
    sys.exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _kill_all(child: int) -> None:
    """Kill a child and all processes that it has started, also those that have left its session."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended before it had a session
    kill_children()


def kill_children(grace_s: float = 0.0) -> None:
    """Kill all children of this process, and the orphans that it adopts then. They may end by themselves before.

    grace_s: seconds for that.
    """
    deadline = time.monotonic() + grace_s
    while pids := _children():
        if time.monotonic() >= deadline:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        if not reaped():
            time.sleep(0.01)


def reaped() -> dict[int, int]:
    """Return the exit codes of the children that have ended since the last call, by process; negative for a signal."""
    ended = {}
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    except ChildProcessError:
        pass  # there is none
    return ended


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [*map(int, file.read().split())]


def prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    main(sys.argv[1:])
