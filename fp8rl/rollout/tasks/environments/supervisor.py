"""Runs a user's command in a process, and ends every process that the command has started.

It imports only the standard library. It ends the command when it gets SIGTERM or when its owner dies. It exits with
the command's status or, if a signal ended the command, with 128 plus the signal's number.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

COMMAND = (sys.executable, "-I", "-S", __file__)
"""The beginning of this program's command line. The command that it supervises follows."""

_PDEATHSIG, _SUBREAPER = 1, 36  # of prctl(2)
_libc = ctypes.CDLL(None, use_errno=True)


def main(command: list[str]) -> None:
    _prctl(_PDEATHSIG, signal.SIGTERM)
    _prctl(_SUBREAPER, 1)  # what is left behind becomes a child of this process
    child = os.fork()
    if not child:
        os.setsid()
        _prctl(_PDEATHSIG, signal.SIGKILL)
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
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            for pid in map(int, file.read().split()):
                os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    main(sys.argv[1:])
