"""Manages Triton's cache of compiled kernels: lists the kernels that processes need, and compiles a list in advance.

Triton compiles a kernel once for each variant of its arguments, when it is first launched. A list in the cache's folder
has the variants that processes needed (`watch`). Worker processes compile such a list into the cache, side by side
(`compile_all`). Their machine needs no GPU, because a variant depends only on the code and on Triton. If several
processes need a missing kernel at the same time, only one compiles it. Each process prints what it compiles.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import pkgutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import driver

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.files import write_atomically

logger = logging.getLogger(__name__)

LIST = "fp8rl_kernels.jsonl"


def directory() -> Path:
    """Return the folder of the cache: TRITON_CACHE_DIR, or the user's."""
    return Path(triton.knobs.cache.dir)


def relocate() -> None:
    """Repair a cache that was moved: Triton writes whole paths into the lists of a kernel's files."""
    for group in directory().glob("*/__grp__*.json"):
        named = json.loads(group.read_text())["child_paths"]
        here = {name: str(group.parent / name) for name in named}
        if named == here:
            return
        write_atomically(group, json.dumps({"child_paths": here}))


def watch() -> None:
    """Let this process list the kernels that it needs, wait while another process compiles one of these kernels, and
    print which kernels it compiles itself."""
    if any(hook is not None for hook in (triton.knobs.runtime.jit_cache_hook, triton.knobs.compilation.listener)):
        return  # somebody watches already
    relocate()
    held = threading.local()

    def enter(*, repr: str, compile: dict[str, Any], **_: Any) -> bool:
        leave()  # of a kernel whose compilation failed
        name = hashlib.sha256(f"{repr} {compile['key']}".encode()).hexdigest()[:32]
        folder = directory() / "fp8rl.locks"
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
            logger.warning(f"kernels: compiled {src.name} in {times.total / 1e6:.1f} s; {directory()} did not have it")

    triton.knobs.runtime.jit_cache_hook = enter
    triton.knobs.runtime.jit_post_compile_hook = compiled
    triton.knobs.compilation.listener = say


def _note(kernel: Any, data: str) -> None:
    """Add one of our kernels to the list, unless it is there. SGLang's kernels have no stable names."""
    if not kernel.module.startswith("fp8rl."):
        return
    line = described(f"{kernel.module}:{kernel.fn.__qualname__}", data).line() + "\n"
    with open(directory() / LIST, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if line not in file.readlines():
            file.write(line)


_KEPT = ("signature", "constant_keys", "constant_vals", "attrs_keys", "attrs_vals")


@dataclass(frozen=True)
class NoDevice:
    """A driver that describes a GPU to Triton, before a launch, although this machine does not have the GPU."""

    capability: tuple[int, int] = (9, 0)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * self.capability[0] + self.capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def no_device() -> Iterator[None]:
    """Let Triton compile inside the block for a Hopper GPU, which this machine need not have."""
    driver.set_active(NoDevice())
    try:
        yield
    finally:
        driver.set_active(None)


@dataclass(frozen=True)
class Variant:
    kernel: str
    """`module:function`"""
    data: str
    """JSON: Triton's description of the variant, as far as it is needed (`described`)."""

    @property
    def name(self) -> str:
        return self.kernel.rpartition(".")[2].replace(":", ".")

    def line(self) -> str:
        """Return the variant as a line of a list."""
        return json.dumps({"kernel": self.kernel} | json.loads(self.data), separators=(",", ":"))


def described(kernel: str, data: str) -> Variant:
    """Return the part of Triton's `specialization_data` that depends neither on the GPU nor on the machine."""
    values = json.loads(data)
    default = make_backend(GPUTarget(**values["target"])).parse_options({}).__dict__
    default = json.loads(json.dumps(default))
    options = {name: value for name, value in values["options"].items() if value != default[name]}
    return Variant(kernel, json.dumps({part: values[part] for part in _KEPT} | {"options": options}))


def read_list(path: Path) -> list[Variant]:
    """Read the variants of a list. Raises UserError if the file is no list of our kernels."""
    found = []
    try:
        for line in path.read_text().splitlines():
            values = json.loads(line)
            kernel = values.pop("kernel")
            if not kernel.startswith("fp8rl.numerics.kernels.") or {*values} != {*_KEPT, "options"}:
                raise ValueError(kernel)
            found.append(Variant(kernel, json.dumps(values)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        expected = "a list that a run or `fp8rl doctor` wrote on a GPU (fp8rl_kernels.jsonl in Triton's cache)"
        raise user_error(str(path), found=str(error), expected=expected, remedy="Name such a file.") from None
    return found


@dataclass
class Compiled:
    """The variants that were compiled, and the number of variants that the cache had."""

    compiled: list[str] = field(default_factory=list)
    """Names of the variants that the cache lacked."""
    cached: int = 0
    """Number of variants that the cache had."""


def compile_all(
    variants: Iterable[Variant], capability: tuple[int, int], processes: int, say: Callable[[str], object]
) -> Compiled:
    """Compile the variants that the cache lacks for GPUs of a compute capability, in `processes` processes.

    say: prints each variant that was compiled.
    Raises UserError: a kernel of the list is no longer there, or has other arguments.
    """
    # A kernel's variants take equally long, and kernels with the longest descriptions take longest.
    ordered, found = sorted(set(variants), key=lambda each: (-len(each.data), each.kernel)), Compiled()
    with ProcessPoolExecutor(processes, get_context("spawn"), _begin, (capability,)) as pool:
        running = {pool.submit(_compile, each, capability): each for each in ordered}
        for done in as_completed(running):
            name = running[done].name
            if (error := done.exception()) is not None:
                pool.shutdown(cancel_futures=True)
                expected = "kernels of this version of fp8rl"
                remedy = "Have `fp8rl doctor` or a run write the list again, on a GPU."
                raise user_error(name, found=str(error)[-2000:], expected=expected, remedy=remedy)
            if (seconds := done.result()) is None:
                found.cached += 1
            else:
                found.compiled.append(name)
                count = len(found.compiled) + found.cached
                say(f"compiled {name} in {seconds:.1f} s ({count} of {len(ordered)} kernels)")
    return found


_seconds: list[float | None] = []


def _begin(capability: tuple[int, int]) -> None:
    """Prepare a worker process: until it ends it compiles for a GPU of this capability."""
    from fp8rl.numerics.kernels import kernels  # noqa: F401, it settles their keys

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        _seconds.append(None if cache_hit else times.total / 1e6)

    triton.knobs.compilation.listener = listen
    driver.set_active(NoDevice(capability))


def _compile(variant: Variant, capability: tuple[int, int]) -> float | None:
    """Compile a variant. Return the seconds that it took; None: the cache had the variant."""
    _seconds.clear()
    kernel = pkgutil.resolve_name(variant.kernel)
    target = NoDevice(capability).get_current_target().__dict__
    named = {"name": variant.kernel.replace(":", "."), "key": "", "target": target}
    kernel.preload(json.dumps(json.loads(variant.data) | named))
    return _seconds[-1] if _seconds else None
