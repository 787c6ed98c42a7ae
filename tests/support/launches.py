"""Counts what a function would launch on a GPU, and the variants of our kernels that would be compiled for it, without
one: tensors are on the meta device, and Triton is stopped where it would compile."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

import tests.support.interpreter  # noqa: F401
from fp8rl.numerics.kernels.cache import no_device

META = torch.device("meta")
aten = torch.ops.aten
_NOTHING = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten._unsafe_view}
"""Ops that are no views and only make room."""


@dataclass
class Launches:
    """torch: by name the ops of torch that launch something. kernels: launches of ours. variants: of each kernel the
    keys under which Triton keeps what it has compiled."""

    torch: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    variants: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def total(self) -> int:
        return self.torch.total() + self.kernels.total()


def address(tensor: torch.Tensor) -> int:
    """A meta tensor's, if its storage begins at a multiple of 512 bytes, as CUDA's allocator has it."""
    return int(tensor.storage_offset()) * tensor.element_size()


@contextlib.contextmanager
def launches() -> Iterator[Launches]:
    """Inside, what is launched is counted and no kernel runs."""
    found = Launches()

    def count(self: Any, key: str, *_: Any, **__: Any) -> None:
        name = f"{self.module.rpartition('.')[2]}.{self.__name__}"
        found.kernels[name] += 1
        found.variants[name].add(key)

    with (
        no_device(),
        mock.patch.object(JITFunction, "_do_compile", count),
        mock.patch.object(torch.Tensor, "data_ptr", address),
        _Ops(found.torch),
    ):
        yield found


class _Ops(TorchDispatchMode):
    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()
        self.counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.overloadpacket not in _NOTHING:
            self.counted[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Made(TorchDispatchMode):
    """The shapes of the tensors that ops make. A copy in another dtype is not counted: CPUs without AVX-512 multiply
    in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func != aten._to_copy.default:
            self.shapes |= {tuple(leaf.shape) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)}
        return out


@contextlib.contextmanager
def interpreted_launches(run_kernels: bool = True) -> Iterator[Launches]:
    """Inside, kernels run in Triton's interpreter and count as launches; what it does to run them does not.

    run_kernels: False for tensors on the meta device, where there is nothing to run on.
    """
    found, run = Launches(), GridExecutor.__call__

    def count(self: Any, *args: Any, **kwargs: Any) -> None:
        found.kernels[f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}"] += 1
        with _disable_current_modes():
            if run_kernels:
                run(self, *args, **kwargs)

    as_a_gpu = mock.patch.object(import_module("fp8rl.numerics.ops.linear"), "multiplies_bf16", lambda device: True)
    with mock.patch.object(GridExecutor, "__call__", count), as_a_gpu, _Ops(found.torch):
        yield found
