"""Triton's cache of compiled kernels, in a process that computes.

Beside it lies a list of the kernels that processes needed, which `fp8rl warm` compiles on any machine. Processes that
need a missing kernel at once do not compile it twice, and each says what it compiles.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import triton

from fp8rl.numerics.core.files import write_atomically
from fp8rl.numerics.kernels.precompile import described

logger = logging.getLogger(__name__)

LIST = "fp8rl_kernels.jsonl"
_LOCKS = "fp8rl.locks"


def directory() -> Path:
    """Return the folder: TRITON_CACHE_DIR, or the user's."""
    return Path(triton.knobs.cache.dir)


def relocate() -> None:
    """Put a cache in order that was moved: Triton writes whole paths into the lists of a kernel's files."""
    for group in directory().glob("*/__grp__*.json"):
        named = json.loads(group.read_text())["child_paths"]
        here = {name: str(group.parent / name) for name in named}
        if named == here:
            return
        write_atomically(group, json.dumps({"child_paths": here}))


def watch() -> None:
    """Have this process list the kernels that it needs, wait while another one compiles one of them, and say what it
    compiles itself."""
    if any(hook is not None for hook in (triton.knobs.runtime.jit_cache_hook, triton.knobs.compilation.listener)):
        return  # somebody watches already
    relocate()
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

    def compiled(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        leave()
        _note(fn.jit_function, compile["specialization_data"])

    def say(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            logger.warning(f"kernels: compiled {src.name} in {times.total / 1e6:.1f} s, which was not in {directory()}")

    triton.knobs.runtime.jit_cache_hook = enter
    triton.knobs.runtime.jit_post_compile_hook = compiled
    triton.knobs.compilation.listener = say


def _note(kernel: Any, data: str) -> None:
    """Add one of our kernels to the list, once; SGLang's have no stable names."""
    if not kernel.module.startswith("fp8rl."):
        return
    line = described(f"{kernel.module}:{kernel.fn.__qualname__}", data).line() + "\n"
    with open(directory() / LIST, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if line not in file.readlines():
            file.write(line)
