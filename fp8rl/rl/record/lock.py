"""Keeps a second process from driving a run: a lock beside its directory, which the kernel releases with its holder."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8rl.numerics.core.errors import user_error

_NOTE = re.compile(rb"(process \d+ on \S+)?")


@contextmanager
def run_lock(path: Path) -> Iterator[None]:
    """Hold the run at `path` for as long as the block lasts. What a killed driver left of a lock holds nothing.

    Raises:
        UserError: another process holds it; the message names it.
    """
    file = path.with_name(f".{path.name}.lock")
    descriptor = _take(file, path)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _take(file: Path, path: Path) -> int:
    while True:
        descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace")
            os.close(descriptor)
            raise user_error(
                "run.name",
                found=f"the run {path}, which is held by {holder or 'a process that is starting'}",
                expected="a run that no process works on",
                remedy="Wait for its end, end that process, or choose another run.name.",
            ) from None
        if _NOTE.fullmatch(os.pread(descriptor, 200, 0)) is None:
            os.close(descriptor)
            raise user_error(
                "run.name",
                found=f"{file}, which is no lock of a run",
                expected="no such file, or one that a run left",
                remedy="Move it away, or choose another run.name.",
            )
        # The holder before may have removed the file between our open and our lock: then ours is nobody's.
        if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
            return descriptor
        os.close(descriptor)
