"""The main program of the process that runs a harness's command; it imports the standard library alone.

It ends the command, and all that the command has started, when it is asked to, when its owner dies, and when the
command ends by itself. Its exit status is that of the command, or 128 and the number of the signal that ended it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PDEATHSIG, _SUBREAPER = 1, 36  # of prctl(2)


def main() -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # what the command leaves behind becomes a child of this process
    child = os.fork()
    if not child:
        os.setsid()
        libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        try:
            os.execvp(sys.argv[1], sys.argv[1:])
        except OSError as error:
            os.write(2, f"{sys.argv[1]}: {error.strerror}\n".encode())
        os._exit(127)

    def end(*_: object) -> None:
        _end_all()
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    _, status = os.waitpid(child, 0)
    _end_all()
    sys.exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _end_all() -> None:
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            for pid in file.read().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
