"""The scratch directory of a server: its sockets and temporary files, and a note of what it leaves elsewhere.

A server that is killed cannot clean up, so each start sweeps up after the dead. Whether a server lives is told by a
lock on a file in its directory: its processes hold it, and the kernel releases it with the last of them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "fp8rl-engine-"
_LOCK = "lock"
_SHARED_MEMORY = "shared_memory"


def make_scratch() -> tuple[Path, int]:
    """A new directory, and the descriptor that holds its lock: to be inherited by the server, then closed here."""
    scratch = Path(tempfile.mkdtemp(prefix=_PREFIX))
    descriptor = os.open(scratch / "new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    (scratch / "new").rename(scratch / _LOCK)
    return scratch, descriptor


def note_shared_memory(scratch: Path, path: str) -> None:
    """Note a file outside the directory that belongs to it."""
    (scratch / _SHARED_MEMORY).write_text(path)


def remove_scratch(scratch: Path) -> None:
    """Remove a directory and the shared memory noted in it."""
    note = scratch / _SHARED_MEMORY
    if note.exists():
        Path(note.read_text()).unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)


def sweep() -> None:
    """Remove the directories of servers that are gone."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # locked, or removed by another sweep
            continue
        remove_scratch(lock.parent)
