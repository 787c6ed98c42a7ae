"""What a launch takes the host, by Triton's own call and by `short_launches`. No GPU is needed: launches do nothing."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fp8rl.numerics.kernels.cache import NoDevice
from fp8rl.numerics.kernels.gates import swiglu_quantize
from fp8rl.numerics.kernels.norm import rms_norm_quantize
from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.operands import backward_operands
from fp8rl.numerics.kernels.quantize import quantize_blocks, quantize_rows
from fp8rl.numerics.spec import QuantSpec, TensorSpec
from lab.bench.measure import Result
from lab.bench.short_launches import launch, shortened

ROWS, BLOCKS, POW2 = TensorSpec(), TensorSpec(granularity="block"), QuantSpec.preset("fp8_block_pow2")
CALLS, ROUNDS = 100, 20


@dataclass(frozen=True)
class Ignored(NoDevice):
    """A driver whose launches do nothing. launched: gets what each launches with which arguments."""

    device: int = 0
    launched: Callable[..., object] = lambda *_: None

    def get_current_device(self) -> int:
        return self.device

    @property
    def utils(self) -> Any:
        properties = {"max_shared_mem": 232_448, "multiprocessor_count": 132}
        return SimpleNamespace(
            load_binary=lambda name, *_: (None, f"{name} {self.device}", 64, 0, 1024),
            get_device_properties=lambda _: properties,
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return functools.partial(self.launched, metadata)


def run() -> Iterator[Result]:
    """Launches that differ between the two calls, then microseconds of this process for an op and for the launch in it
    alone, by either call."""
    yield _differing()
    driver.set_active(Ignored(device=2))
    x, wide, weight = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((16, 256), (16, 512), (256, 256)))
    rows, operand = quantize_rows(x, ROWS), quantize_blocks(weight, BLOCKS)
    ops: dict[str, Callable[[], Any]] = {
        "product": lambda: gemm(rows, operand, torch.bfloat16),
        "rows": lambda: quantize_rows(x, ROWS),
        "RMSNorm + rows": lambda: rms_norm_quantize(x, x[0], 1e-6, ROWS),
        "SwiGLU + rows": lambda: swiglu_quantize(wide, ROWS),
        "operands of a backward": lambda: backward_operands(x, x, POW2),
    }
    alone = {name: _launch_of(op) for name, op in ops.items()}
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for side, launching in (("Triton's", contextlib.nullcontext), ("short", shortened)):
            with launching():
                for name in ops:
                    taken.setdefault((f"op, {side} (us)", name), []).append(_us_of(ops[name]))
                    taken.setdefault((f"launch, {side} (us)", name), []).append(_us_of(alone[name]))
    for name in ops:
        parts = {what: min(us) for (what, of), us in taken.items() if of == name}
        yield Result(f"us of the host, a short launch of {name}", parts["launch, short (us)"], 10.0, False, parts)


def _launch_of(op: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that repeats the launch in an op with the same arguments."""
    found: list[Callable[[], Any]] = []
    own = JITFunction.run

    def keep(kernel: Any, *arguments: Any, **named: Any) -> Any:
        found.append(lambda: kernel.run(*arguments, **named))
        return own(kernel, *arguments, **named)

    with mock.patch.object(JITFunction, "run", keep):
        op()
    return found[-1]


def _us_of(call: Callable[[], Any]) -> float:
    call()
    start = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - start) / CALLS * 1e6


# Launches of every kind of variant, by both calls.


@triton.jit
def _kernel(x_ptr, other_ptr, number, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < number, other=0.0) * factor
    if other_ptr is not None:
        x += tl.load(other_ptr + at)
    tl.store(x_ptr + at, x)


def _variants() -> None:
    """Launch with other dtypes, alignments, numbers, missing pointers, options, grids and descriptors."""
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(64, 256, dtype=dtype)
        for begin in (0, 8, 1):  # pointers to multiples of 16 and to others
            part = x.flatten()[begin:]
            for number in (1, 2, 16, 17, 1 << 31, 1 << 35, 2.5, True):
                _kernel[(3,)](part, part, number, number, BLOCK=128)
            for options in ({}, {"num_warps": 8}, {"num_stages": 8}, {"num_warps": 2, "maxnreg": 64}):
                _kernel[3, 5, 7](part, None, 16, 2, BLOCK=256, **options)
        rms_norm_quantize(x, x[0], 1e-6, ROWS)
        backward_operands(x, x, POW2)
    rows, weights = quantize_rows(x, ROWS), quantize_blocks(x, BLOCKS)
    for dtype in (torch.bfloat16, torch.float32):
        gemm(rows, weights, dtype)


def _differing() -> Result:
    """Count launches on two devices that differ from those of Triton's own call: when a variant is launched first, and
    when it is launched again, then without that call."""
    found: list[list[Any]] = []

    def launched(metadata: Any, *arguments: Any) -> None:
        own, hooks, values = arguments[:6], arguments[6:9], arguments[9:]
        assert len(hooks) == 3
        found.append([metadata.hash, *own, *map(_told, values)])

    def launches() -> list[list[Any]]:
        found.clear()
        for device in (0, 1):
            driver.set_active(Ignored(device=device, launched=launched))
            _variants()
        return list(found)

    expected = launches()
    with shortened():
        _kernel.run = functools.partial(launch, _kernel, {})
        first = launches()
        with mock.patch.object(JITFunction, "run", None):
            again = launches()
    both = [*zip(expected, first, strict=True), *zip(expected, again, strict=True)]
    different = sum(one != other for one, other in both)
    kinds = len({str(each[:7]) for each in expected})
    return Result("short launches that differ", different, 0.0, False, {"launches": len(both), "variants": kinds})


def _told(x: Any) -> str:
    x = getattr(x, "base", x)  # of a tensor's descriptor
    return f"{x.dtype} {x.shape} {x.storage_offset()}" if isinstance(x, torch.Tensor) else repr(x)
