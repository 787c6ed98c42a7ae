"""Runs a Python file with limits of memory and time and without sockets: `limited.py BYTES SECONDS FILE`.

It imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from typing import Any

_NO_NEW_PRIVS, _SECCOMP = 38, 22  # of prctl(2)
_FILE_LIMIT = 16 * 2**20
_ALLOW, _REFUSE, _EACCES = 0x7FFF0000, 0x00050000, 13  # of seccomp(2)
_SOCKET_OF_ARCHITECTURE = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
_IO_URING_SETUP = 425
_libc = ctypes.CDLL(None, use_errno=True)


def main(memory: int, seconds: int, file: str) -> None:
    """Turn this process into the interpreter that runs the file."""
    for kind, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, _FILE_LIMIT),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    refuse_sockets()
    os.execve(sys.executable, [sys.executable, "-I", file], dict(os.environ))


def refuse_sockets() -> None:
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


def _prctl(option: int, *arguments: Any) -> None:
    if _libc.prctl(option, *arguments, *[0] * (4 - len(arguments))):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
