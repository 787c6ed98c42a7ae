"""Makes scratch directories for sockets and temporary files, and removes those whose owner has ended.

A killed process cannot clean up. So each start removes the directories of dead owners. The owner's processes lock a
file in the directory until the last of them ends. A note in the directory names a file that the owner made elsewhere.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from fp8rl.numerics.core.files import write_atomically

ENGINE, RAY = "fp8rl-engine-", "fp8rl-ray-"
"""Prefixes of the directories of engines and of Ray."""
SHARED = Path("/dev/shm")
"""The directory of shared memory."""
_LOCK = "lock"
_SHARED_MEMORY = "shared_memory"


def make_scratch(prefix: str = ENGINE, parent: str | None = None) -> tuple[Path, int]:
    """Return a new directory, and the descriptor that holds its lock. Keep the descriptor open until a server has
    inherited it.

    parent: the directory in which it is made. None: the temporary directory.
    """
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    descriptor = os.open(scratch / "new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    (scratch / "new").rename(scratch / _LOCK)
    return scratch, descriptor


def note_shared_memory(scratch: Path, path: str) -> None:
    """Note a file outside the scratch directory, to be removed with the directory."""
    write_atomically(scratch / _SHARED_MEMORY, path)


def remove_queues(pids: Collection[int]) -> None:
    """Remove the shared memory through which the ranks of an engine communicate. pids: the ids of its processes.

    SGLang kills its ranks and leaves their shared memory. Its files have names `sgl_shm_KIND_PID_RANDOM`.
    """
    for path in SHARED.glob("sgl_shm_*_*_*"):
        if path.name.split("_")[-2] in {str(pid) for pid in pids}:
            path.unlink(missing_ok=True)


def remove_scratch(scratch: Path) -> None:
    """Remove a directory, and the shared memory that notes name in it or in the engines' directories below it."""
    for note in (scratch / _SHARED_MEMORY, *scratch.glob(f"*/{ENGINE}*/{_SHARED_MEMORY}")):
        with suppress(OSError, ValueError):  # not noted, or gone with another sweep
            if (path := Path(note.read_text())).parent == SHARED:
                path.unlink()
    shutil.rmtree(scratch, ignore_errors=True)


def sweep(prefix: str = ENGINE, parent: str | None = None) -> None:
    """Remove this user's directories whose owners have ended. Leave other users' directories, because a note in one
    could make us remove a file of ours."""
    for lock in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*/{_LOCK}"):
        with suppress(OSError):  # locked, or removed by another sweep
            if lock.parent.lstat().st_uid != os.getuid():
                continue
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_scratch(lock.parent)
