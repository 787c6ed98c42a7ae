"""Compiles whatever Triton kernels a function launches for an H200 (sm_90a), on a machine without a GPU.

Triton brings its own assembler, so only the launch itself needs a device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel as it would run. shared: bytes. instructions: the matrix and cast instructions of its PTX.
    divisions: IEEE divisions in FP32, as often as they are written there. sums: the layouts in which its FP32 matrices
    are reduced, which decide the order of addition."""

    name: str
    shared: int
    registers: int
    spilled: int
    instructions: tuple[str, ...]
    divisions: int
    sums: tuple[str, ...]


class NoDevice:
    """What Triton asks a driver for before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiled_only() -> Iterator[list[Compiled]]:
    """Inside, a launch compiles its kernel for the H200 and runs nothing; the list fills with what was compiled."""
    found: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.append(_described(self.__name__, kernel))
        return kernel

    driver.set_active(NoDevice())
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run
        driver.set_active(None)


def _described(name: str, kernel: Any) -> Compiled:
    ptx = kernel.asm["ptx"]
    wanted = r"cvt\.rn\.satfinite[.\w]+|wgmma\.mma_async[.\w]+|mma\.sync[.\w]+|fma\.rn\.f32"
    return Compiled(
        name,
        kernel.metadata.shared,
        *_resources(kernel.asm["cubin"]),
        tuple(sorted(set(re.findall(wanted, ptx)))),
        ptx.count("div.rn.f32"),
        _sums(kernel.asm["ttgir"]),
    )


def _sums(ttgir: str) -> tuple[str, ...]:
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    reduced = re.findall(r"\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\)", ttgir)
    return tuple(sorted({layouts[name] for name in reduced}))


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of its stack: what did not fit into registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def compiled_elsewhere(script: str) -> list[dict[str, Any]]:
    """The kernels that `script` launches inside `compiled_only() as found`, as `Compiled` in plain data.

    In a process of its own: whether Triton interprets or compiles is settled when its kernels are defined.
    """
    kernels: list[dict[str, Any]] = found_elsewhere(
        script + "\nimport dataclasses, json\nprint(json.dumps([dataclasses.asdict(kernel) for kernel in found]))"
    )
    return kernels


def found_elsewhere(script: str) -> Any:
    """What `script` prints last, as JSON, in a process whose kernels are not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])
