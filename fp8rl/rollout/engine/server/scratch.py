"""Makes scratch directories for sockets and temporary files, and removes those whose owner has ended.

A killed process cannot clean up. So each start removes the directories of dead owners. The owner's processes lock a
file in the directory until the last of them ends. SGLang's file in shared memory has the directory's name in its name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

ENGINE, RAY = "fp8rl-engine-", "fp8rl-ray-"
"""Prefixes of the directories of engines and of Ray."""
SHARED = Path("/dev/shm")
"""The directory of shared memory."""
_LOCK = "lock"


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


def remove_queues(pids: Collection[int]) -> None:
    """Remove the shared memory through which the ranks of an engine communicate. pids: the ids of its processes.

    SGLang kills its ranks and leaves their shared memory. Its files have names `sgl_shm_KIND_PID_RANDOM`.
    """
    for path in SHARED.glob("sgl_shm_*_*_*"):
        if path.name.split("_")[-2] in {str(pid) for pid in pids}:
            path.unlink(missing_ok=True)


def remove_scratch(scratch: Path) -> None:
    """Remove a directory, and the shared memory of its engine, or of the engines whose directories are below it."""
    for folder in (scratch, *scratch.glob(f"*/{ENGINE}*")):
        for path in SHARED.glob(f"sglang_loads_{folder.name}_*"):
            path.unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)


def sweep(prefix: str = ENGINE, parent: str | None = None) -> None:
    """Remove this user's directories whose owners have ended. Another user's could have the name of one of ours."""
    for lock in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*/{_LOCK}"):
        with suppress(OSError):  # locked, or removed by another sweep
            if lock.parent.lstat().st_uid != os.getuid():
                continue
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_scratch(lock.parent)
