"""The main program of a process that runs other people's code, and that ends every process which this code has started.

It imports the standard library alone. With a command as its arguments it runs the command. It ends the command when it
is asked to or when its owner dies, and exits with the command's status, or with 128 and the number of the signal that
ended it. Without arguments it runs Python code that a model wrote (`rollout.environments.sandbox`): standard input is
one JSON object with the code, its limits of time and memory and the length of output that is wanted; standard output is
the result.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import select
import signal
import struct
import sys
import time
from typing import Any

COMMAND = (sys.executable, "-I", "-S", __file__)
"""The beginning of a command line by which this program runs; what follows is the command that it supervises."""

_PDEATHSIG, _NO_NEW_PRIVS, _SECCOMP, _SUBREAPER = 1, 38, 22, 36  # of prctl(2)
_SCRIPT = "answer.py"
_FILE_LIMIT = 16 * 2**20
_ALLOW, _REFUSE, _EACCES = 0x7FFF0000, 0x00050000, 13  # of seccomp(2)
_SOCKET_OF_ARCHITECTURE = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
_IO_URING_SETUP = 425
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    _prctl(_PDEATHSIG, signal.SIGTERM)
    _prctl(_SUBREAPER, 1)  # what is left behind becomes a child of this process
    if command := sys.argv[1:]:
        _run_command(command)
    else:
        _run_code(json.load(sys.stdin))


def _run_command(command: list[str]) -> None:
    child = os.fork()
    if not child:
        os.setsid()
        _prctl(_PDEATHSIG, signal.SIGKILL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)
    signal.signal(signal.SIGTERM, lambda *_: (_kill_all(child), os._exit(1)))
    _, status = os.waitpid(child, 0)
    _kill_all(child)
    sys.exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _run_code(request: dict[str, Any]) -> None:
    with open(_SCRIPT, "w", encoding="utf-8", errors="replace") as file:
        file.write(request["code"])
    output, end = os.pipe()
    child = os.fork()
    if not child:
        _become(request, end)
    os.close(end)
    signal.signal(signal.SIGTERM, lambda *_: (_kill_all(child), os._exit(1)))
    printed, in_time = _read(output, request["timeout_s"], request["longest"])
    status = _kill_all(child)
    text = printed.decode("utf-8", "replace")
    if not in_time:
        text += f"\nit took more than {request['timeout_s']:g} s"
    elif os.WIFSIGNALED(status):
        text += f"\nit was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    print(json.dumps({"text": text, "ok": in_time and status == 0}))


def _become(request: dict[str, Any], end: int) -> None:
    """Turn this process into the interpreter that runs the code."""
    try:
        os.setsid()
        _prctl(_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(end, 1)
        os.dup2(end, 2)
        os.closerange(3, 1 << 12)
        seconds = math.ceil(request["timeout_s"]) + 1
        for kind, limit in (
            (resource.RLIMIT_AS, request["memory"]),
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_FSIZE, _FILE_LIMIT),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (limit, limit))
        _refuse_sockets()
        os.execve(sys.executable, [sys.executable, "-I", _SCRIPT], {"HOME": os.getcwd(), "LANG": "C.UTF-8"})
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(126)


def _refuse_sockets() -> None:
    """Refuse sockets from here on, in every child too, also through io_uring. Raises OSError."""
    architecture, socket = _SOCKET_OF_ARCHITECTURE[os.uname().machine]

    def instruction(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    program = b"".join(
        [
            instruction(load, 0, 0, 4),  # of struct seccomp_data: the architecture
            instruction(equal, 0, 5, architecture),
            instruction(load, 0, 0, 0),  # the system call
            instruction(at_least, 3, 0, 0x40000000),  # of another table, x32
            instruction(equal, 2, 0, socket),
            instruction(equal, 1, 0, _IO_URING_SETUP),
            instruction(give, 0, 0, _ALLOW),
            instruction(give, 0, 0, _REFUSE | _EACCES),
        ]
    )
    held = ctypes.create_string_buffer(program)
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    _prctl(_NO_NEW_PRIVS, 1)
    _prctl(_SECCOMP, 2, ctypes.c_char_p(described))


def _read(output: int, seconds: float, longest: int) -> tuple[bytes, bool]:
    """Read until nobody can write any more; return the first `longest` bytes, and False if there was no end in time."""
    printed, deadline = b"", time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0 and select.select([output], [], [], left)[0]:
        piece = os.read(output, 1 << 16)
        if not piece:
            return printed, True
        printed += piece[: longest - len(printed)]
    return printed, False


def _kill_all(child: int) -> int:
    """Kill a child and all that it has started, also what has left its session; return its exit status."""
    status = 0
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended before it had a session
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            for pid in map(int, file.read().split()):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, ended = os.wait()
        except ChildProcessError:
            return status
        status = ended if pid == child else status


def _prctl(option: int, *arguments: Any) -> None:
    if _libc.prctl(option, *arguments, *[0] * (4 - len(arguments))):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    main()
