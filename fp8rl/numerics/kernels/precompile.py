"""Compiles kernels before anything launches them, on a machine that need not have a GPU.

Triton compiles a kernel once for each variant of its arguments, when it is first launched: a minute or two before a run
does anything, in the trainer and in each engine. Here ops are called on tensors of the meta device, where nothing is
computed, and each launch is noted as Triton's own description of the variant. Worker processes then compile these into
Triton's cache, all at once. What a variant is depends on the code, Triton and the GPU's architecture, not on the GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fp8rl.numerics.kv import KVFormat

META = torch.device("meta")


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
    """Triton's description of it, which `JITFunction.preload` compiles."""

    @property
    def name(self) -> str:
        return self.kernel.rpartition(".")[2].replace(":", ".")


@contextlib.contextmanager
def recorded(capability: tuple[int, int]) -> Iterator[dict[Variant, None]]:
    """Inside, what kernels would be launched with is noted, in order, and nothing runs."""
    found: dict[Variant, None] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel = fn.jit_function
        found[Variant(f"{kernel.module}:{kernel.fn.__qualname__}", compile["specialization_data"])] = None
        return True  # leave it out

    hook, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, note
    try:
        with no_device(capability), mock.patch.object(Tensor, "data_ptr", address):
            yield found
    finally:
        triton.knobs.runtime.jit_cache_hook = hook


def address(tensor: Tensor) -> int:
    """A meta tensor's, if its storage begins at a multiple of 512 bytes, as CUDA's allocator has it."""
    return int(tensor.storage_offset()) * tensor.element_size()


def launch_probe(kv: KVFormat) -> None:
    """Call what a process tries at its start (`numerics.backend.probe`). Tiles of all sizes are allowed afterwards.

    kv: the format of the engine's cache.
    """
    from fp8rl.numerics.backend import probe

    with mock.patch.object(probe, "_same", lambda a, b: True):
        probe.choose_tiles(META)
        probe.row_variant_ops(META, kv)


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
    """Compile what the cache lacks of these, in as many processes. say: told what is being compiled.

    Raises:
        RuntimeError: a process failed; its end names the kernel.
    """
    # A kernel's variants take as long as each other, and the longest are those of the longest descriptions.
    left = deque(sorted(variants, key=lambda each: (-len(each.data), each.kernel)))
    total, found, lock = len(left), Compiled(), threading.Lock()
    failures: list[str] = []

    def work() -> None:
        command = [sys.executable, "-P", "-m", __name__, json.dumps(capability)]
        # Whether Triton interprets or compiles is settled when its kernels are defined.
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        complaints: list[str] = []
        reader = threading.Thread(target=lambda: complaints.extend(process.stderr), daemon=True)  # type: ignore[arg-type]
        reader.start()
        name = ""
        try:
            while True:
                with lock:
                    if not left or failures:
                        break
                    variant = left.popleft()
                name = variant.name
                process.stdin.write(json.dumps([variant.kernel, variant.data]) + "\n")
                process.stdin.flush()
                if not (answer := process.stdout.readline()):
                    raise OSError("it ended")
                seconds = json.loads(answer)
                with lock:
                    if seconds is None:
                        found.cached += 1
                    else:
                        found.compiled.append(name)
                        done = len(found.compiled) + found.cached
                        say(f"compiled {name} in {seconds:.1f} s ({done} of {total} kernels)")
        except OSError:
            process.wait()
            reader.join()
            failures.append(f"{name}: {''.join(complaints[-20:]).strip()}")
        finally:
            process.stdin.close()
            process.wait()
            reader.join()
            process.stdout.close()
            process.stderr.close()

    workers = [threading.Thread(target=work) for _ in range(min(processes, total))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise RuntimeError(f"kernels: found one that does not compile, {failures[0]}")
    return found


def _compile_lines(capability: Sequence[int]) -> None:
    """Compile the variants of the standard input, one a line; answer with the seconds of each, null: it was cached."""
    from fp8rl.numerics.kernels import kernels  # noqa: F401, it settles their keys

    answers, sys.stdout = sys.stdout, sys.stderr
    seconds: list[float | None] = []

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        seconds.append(None if cache_hit else times.total / 1e6)

    triton.knobs.compilation.listener = listen
    with no_device((capability[0], capability[1])):
        for line in sys.stdin:
            kernel, data = json.loads(line)
            seconds.clear()
            pkgutil.resolve_name(kernel).preload(data)
            print(json.dumps(seconds[-1] if seconds else None), file=answers, flush=True)


if __name__ == "__main__":
    _compile_lines(json.loads(sys.argv[1]))
