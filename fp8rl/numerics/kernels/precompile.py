"""Compiles a list of kernels before anything launches them, on a machine that need not have a GPU.

Triton compiles a kernel once for each variant of its arguments, when it is first launched. `cache.watch` writes down
which variants a process needed; worker processes compile these into Triton's cache, all at once. What a variant is
depends on the code and on Triton, and not on the GPU.
"""

from __future__ import annotations

import contextlib
import json
import pkgutil
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

_KEPT = ("signature", "constant_keys", "constant_vals", "attrs_keys", "attrs_vals")
_OURS = "fp8rl.numerics.kernels."


@dataclass(frozen=True)
class NoDevice:
    """What Triton asks a driver for before it launches: a GPU of an architecture that is not there."""

    capability: tuple[int, int] = (9, 0)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * self.capability[0] + self.capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def no_device(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Inside, Triton compiles for a GPU of this compute capability, and finds none to launch on."""
    driver.set_active(NoDevice(capability))
    try:
        yield
    finally:
        driver.set_active(None)


@dataclass(frozen=True)
class Variant:
    """One variant of a kernel."""

    kernel: str
    """`module:function`"""
    data: str
    """JSON: Triton's description of it, as far as it is needed (`described`)."""

    @property
    def name(self) -> str:
        return self.kernel.rpartition(".")[2].replace(":", ".")

    def line(self) -> str:
        """Return the variant as a line of a list."""
        return json.dumps({"kernel": self.kernel} | json.loads(self.data), separators=(",", ":"))


def described(kernel: str, data: str) -> Variant:
    """Keep of Triton's `specialization_data` what depends neither on the GPU nor on the machine."""
    values = json.loads(data)
    default = make_backend(GPUTarget(**values["target"])).parse_options({}).__dict__
    default = json.loads(json.dumps(default))
    options = {name: value for name, value in values["options"].items() if value != default[name]}
    return Variant(kernel, json.dumps({part: values[part] for part in _KEPT} | {"options": options}))


def read_list(path: Path) -> list[Variant]:
    """Read the variants of a list. Raises UserError: it is no list of our kernels."""
    found = []
    try:
        for line in path.read_text().splitlines():
            values = json.loads(line)
            kernel = values.pop("kernel")
            if not kernel.startswith(_OURS) or {*values} != {*_KEPT, "options"}:
                raise ValueError(kernel)
            found.append(Variant(kernel, json.dumps(values)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        expected = "a list that a run or `fp8rl doctor` wrote on a GPU (fp8rl_kernels.jsonl in Triton's cache)"
        raise user_error(str(path), found=str(error), expected=expected, remedy="Name such a file.") from None
    return found


@dataclass
class Compiled:
    """The variants that were compiled, and those that the cache had."""

    compiled: list[str] = field(default_factory=list)
    """Names of those that the cache lacked."""
    cached: int = 0
    """Those that it had."""


def compile_all(
    variants: Iterable[Variant], capability: tuple[int, int], processes: int, say: Callable[[str], object]
) -> Compiled:
    """Compile what the cache lacks of these for GPUs of a compute capability, in as many processes.

    say: told what is being compiled.

    Raises:
        UserError: a kernel of the list is no longer there, or has other arguments.
    """
    # A kernel's variants take as long as each other, and the longest are those of the longest descriptions.
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
    """Prepare a worker: it has no other device for as long as it lives."""
    from fp8rl.numerics.kernels import kernels  # noqa: F401, it settles their keys

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        _seconds.append(None if cache_hit else times.total / 1e6)

    triton.knobs.compilation.listener = listen
    driver.set_active(NoDevice(capability))


def _compile(variant: Variant, capability: tuple[int, int]) -> float | None:
    """Return the seconds that it took; None: the cache had it."""
    _seconds.clear()
    kernel = pkgutil.resolve_name(variant.kernel)
    target = NoDevice(capability).get_current_target().__dict__
    named = {"name": variant.kernel.replace(":", "."), "key": "", "target": target}
    kernel.preload(json.dumps(json.loads(variant.data) | named))
    return _seconds[-1] if _seconds else None
