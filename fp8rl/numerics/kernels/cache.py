"""Triton's cache of compiled kernels: a folder that can be filled beforehand and carried to another machine.

A stamp in it says which Triton filled it, where it lay, and which specs it is warm for. Where a kernel is missing all
the same, processes that meet it at once do not compile it twice, and each says what it compiles.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import triton_key

from fp8rl.numerics.core.files import write_atomically

logger = logging.getLogger(__name__)

_STAMP, _LOCK, _LOCKS = "fp8rl.json", "fp8rl.lock", "fp8rl.locks"


def directory() -> Path:
    """Return the folder: TRITON_CACHE_DIR, or the user's."""
    return Path(triton.knobs.cache.dir)


def triton_digest() -> str:
    """Return what tells this Triton from others: kernels of another are never taken."""
    return hashlib.sha256(triton_key().encode()).hexdigest()[:16]


def problem(place: Path | None = None) -> str | None:
    """Return a line about a cache that another Triton filled; None where there is none, or this one did."""
    stamp = _read(place or directory())
    if not stamp or stamp["triton"] == triton_digest():
        return None
    return (
        f"TRITON_CACHE_DIR: found kernels of Triton {stamp['version']} in {place or directory()}, expected those of "
        f"{triton.__version__}, which takes no others and compiles all of them anew. Carry a cache that `fp8rl warm` "
        "made with this Triton, or let it fill this one"
    )


def is_warm(spec: str) -> bool:
    """Return whether the cache has the kernels of a spec, by its digest. A cache that was moved is put in order."""
    stamp = _read(directory())
    if not stamp or stamp["triton"] != triton_digest():
        return False
    if stamp["directory"] != str(directory()):
        _relocate(directory())
        _write(stamp["warm"])
    return spec in stamp["warm"]


def note_warm(spec: str) -> None:
    """Note that the cache has the kernels of a spec."""
    stamp = _read(directory())
    before = stamp["warm"] if stamp and stamp["triton"] == triton_digest() else []
    _write(sorted({*before, spec}))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let one process at a time fill the cache."""
    directory().mkdir(parents=True, exist_ok=True)
    with open(directory() / _LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(place: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((place / _STAMP).read_text())
    except (OSError, ValueError):
        return None
    return found if {"triton", "version", "directory", "warm"} <= found.keys() else None


def _write(warm: list[str]) -> None:
    directory().mkdir(parents=True, exist_ok=True)
    stamp = {"triton": triton_digest(), "version": triton.__version__, "directory": str(directory()), "warm": warm}
    write_atomically(directory() / _STAMP, json.dumps(stamp, indent=1) + "\n")


def _relocate(place: Path) -> None:
    """Have the lists of a kernel's files name them where they are: Triton writes whole paths into them."""
    for group in place.glob("*/__grp__*.json"):
        named = json.loads(group.read_text())["child_paths"]
        write_atomically(group, json.dumps({"child_paths": {name: str(group.parent / name) for name in named}}))


# Kernels that the cache lacks, in a process that computes.


def watch() -> None:
    """Have this process wait while another one compiles the kernel that it needs, and say what it compiles itself."""
    if any(hook is not None for hook in (triton.knobs.runtime.jit_cache_hook, triton.knobs.compilation.listener)):
        return  # somebody watches already
    held = threading.local()

    def enter(*, repr: str, compile: dict[str, Any], **_: Any) -> bool:
        leave()  # of a kernel whose compilation failed
        name = hashlib.sha256(f"{repr} {compile['key']}".encode()).hexdigest()[:32]
        folder = directory() / _LOCKS
        folder.mkdir(parents=True, exist_ok=True)
        held.lock = os.open(folder / name, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(held.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning(f"kernels: waiting for another process that compiles {repr.partition('[')[0]}")
            fcntl.flock(held.lock, fcntl.LOCK_EX)
        return False

    def leave(**_: Any) -> None:
        if (lock := getattr(held, "lock", None)) is not None:
            os.close(lock)
            held.lock = None

    def say(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            logger.warning(
                f"kernels: compiled {src.name} in {times.total / 1e6:.1f} s, which was not in {directory()}; "
                "`fp8rl warm SPEC` compiles kernels beforehand"
            )

    triton.knobs.runtime.jit_cache_hook = enter
    triton.knobs.runtime.jit_post_compile_hook = leave
    triton.knobs.compilation.listener = say
