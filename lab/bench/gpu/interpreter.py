"""Runs a kernel in gluon, whose warps are specialised, on a CPU. Triton's own interpreter does not know gluon.

Each group of warps is a thread, and barriers count arrivals and bytes as the hardware does, so that a wrong phase is a
deadlock or a wrong result here, too. Programs run one after the other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LONGEST_WAIT_S = 60


class Pointer:
    """Addresses of a tensor's numbers: an int, or a tensor of them."""

    def __init__(self, values: Tensor, places: Any = 0) -> None:
        self.values, self.places = values, places
        self.dtype = SimpleNamespace(element_ty=values.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.values, self.places + offset)

    def flat(self) -> Tensor:
        """All memory from the tensor's first number on."""
        first = self.values.storage_offset()
        room = self.values.untyped_storage().nbytes() // self.values.itemsize
        return self.values.as_strided((room - first,), (1,), first)


class Shared:
    """Tiles in shared memory."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def index(self, stage: int) -> Shared:
        return Shared(self.values[stage])

    def slice(self, first: int, length: int) -> Shared:
        return Shared(self.values[first : first + length])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.values.permute(*order))


class Barrier:
    """A barrier of the hardware: a phase ends when all have arrived and all bytes have come."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.bytes = self.phase = 0

    def begin(self, count: int) -> None:
        self.count = self.missing = count

    def change(self, arrivals: int = 0, size: int = 0) -> None:
        with self.changed:
            self.missing, self.bytes = self.missing - arrivals, self.bytes + size
            if not self.missing and not self.bytes:
                self.phase, self.missing = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase & 1 != phase, LONGEST_WAIT_S):
                raise RuntimeError(f"a phase of a barrier did not end within {LONGEST_WAIT_S} s")


def launch(kernel: Any, *args: Any, grid: tuple[int], warmup: bool, num_warps: int, **constants: Any) -> None:
    """Run a kernel as its own `run` does."""
    module, given = sys.modules[kernel.__module__], [_given(value) for value in args]
    with _plain(module) as language:
        for program in range(*grid):
            language.program_id = lambda _, program=program: program
            language.num_programs = lambda _: grid[0]
            kernel.fn(*given, **constants)


def _given(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        return SimpleNamespace(**vars(value), dtype=value.base.dtype)
    return Pointer(value) if isinstance(value, Tensor) else value


@contextmanager
def _plain(module: ModuleType) -> Iterator[Any]:
    """Inside, the functions of a module are Python's, its constants plain, and gluon is this file's."""
    language = SimpleNamespace(**_LANGUAGE)
    names: dict[str, Any] = {"gl": language, **_HARDWARE}
    for name, value in vars(module).items():
        if isinstance(value, gl.constexpr):
            names[name] = value.value
        elif isinstance(value, GluonJITFunction):
            names[name] = value.fn
    with mock.patch.multiple(module, **names):
        yield language


def _specialize(functions: list[tuple[Callable[..., None], Any]], *_: Any) -> None:
    with ThreadPoolExecutor(len(functions)) as groups:
        for group in [groups.submit(function, *args) for function, args in functions]:
            group.result()


def _copy(descriptor: Any, place: Sequence[int], barrier: Barrier, target: Shared) -> None:
    """Copy a block of a matrix; beyond the matrix's edges are zeros."""
    (row, column), (rows, columns) = place, descriptor.block_shape
    block = descriptor.base[row : row + rows, column : column + columns]
    target.values.zero_()
    target.values.view(torch.uint8)[: block.shape[0], : block.shape[1]] = block.view(torch.uint8)
    barrier.change(size=-target.values.nbytes)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply as Triton's interpreter does."""
    return torch.from_numpy(np.matmul(a.half().numpy(), b.half().numpy(), dtype=np.float32))


def _load(pointer: Pointer) -> Any:
    found = pointer.flat()[pointer.places]
    return found if isinstance(pointer.places, Tensor) else found.item()


def _store(pointer: Pointer, values: Tensor, mask: Tensor) -> None:
    pointer.flat()[pointer.places[mask]] = values[mask]


def _allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if dtype == torch.int64:
        barriers = [Barrier() for _ in range(shape[0])]
        return SimpleNamespace(index=lambda stage: barriers[stage])
    return Shared(torch.zeros(*shape, dtype=dtype))


def _minimum(a: Any, b: Any) -> Any:
    return torch.clamp(a, max=b) if isinstance(a, Tensor) else min(a, b)


_LANGUAGE: dict[str, Any] = {
    **{name: getattr(gl, name) for name in ("constexpr", "SliceLayout", "NVMMADistributedLayout", "BlockedLayout")},
    "int64": torch.int64,
    "float32": torch.float32,
    "static_range": range,
    "allocate_shared_memory": _allocate,
    "warp_specialize": _specialize,
    "cdiv": lambda a, b: -(-a // b),
    "cast": lambda value, _: value,
    "minimum": _minimum,
    "arange": lambda first, after, layout: torch.arange(first, after),
    "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    "expand_dims": lambda value, axis: value.unsqueeze(axis),
    "broadcast": torch.broadcast_tensors,
    "fma": lambda a, b, c: a * b + c,
    "convert_layout": lambda value, layout: value,
    "load": _load,
    "store": _store,
}
_HARDWARE: dict[str, Any] = {
    "mbarrier": SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=lambda barrier, count: barrier.begin(count),
        wait=lambda barrier, phase: barrier.wait(phase),
        expect=lambda barrier, size: barrier.change(arrivals=1, size=size),
        arrive=lambda barrier: barrier.change(arrivals=1),
    ),
    "tma": SimpleNamespace(async_copy_global_to_shared=_copy),
    "warpgroup_mma": lambda a, b, acc, use_acc, is_async: _multiply(a.values, b.values),
    "warpgroup_mma_wait": lambda _, deps: deps[0],
}
