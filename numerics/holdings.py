"""Tensors that a process holds, as the inventories of the trainer and of the engine list them."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


@dataclasses.dataclass(frozen=True)
class Holding:
    """One tensor, or what stands for it, in a process's memory.

    Attributes:
        name: of the parameter that it belongs to, as its owner calls it, or of the buffer.
        kind: what it is for: `parameters`, `masters`, …; see the inventory that lists it.
        format: `fp32`, `bf16`, `e4m3`, `e5m2`, or as torch names the dtype.
        shape: of what this process has of it.
        bytes: with its scales and transposed copies, where it has any.
    """

    name: str
    kind: str
    format: str
    shape: tuple[int, ...]
    bytes: int


def format_of(dtype: torch.dtype) -> str:
    """A dtype as specs and inventories name it."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def holding(name: str, kind: str, *tensors: torch.Tensor) -> Holding:
    """The holding of one or several tensors, of which the first says the format and the shape."""
    first = tensors[0]
    return Holding(name, kind, format_of(first.dtype), tuple(first.shape), sum(tensor.nbytes for tensor in tensors))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an operand (`numerics.ops.weight_operand`), in whatever form an implementation gives it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for each in vars(value).values():  # and what it has made of its fields since
            yield from tensors_in(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for each in value:
            yield from tensors_in(each)


def give_back() -> None:
    """Have the C library return what was freed: it would keep blocks that are no larger than those it has been given
    back before. And torch what was freed on the GPU, for other processes there."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
