"""Sums that a GPU takes in no defined order, found without one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_PLACE_OF_INDEX = {
    **dict.fromkeys((aten.index_add, aten.index_add_, aten.index_reduce, aten.index_reduce_), "rows"),
    **dict.fromkeys((aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.scatter_reduce_), "elements"),
}
_ALWAYS = {aten.cumsum, aten.cumsum_, aten.cumprod, aten.put_, aten.embedding_bag, aten.histc, aten.kthvalue}


class Atomics(TorchDispatchMode):
    """Collects, as `found`, the ops that add floating-point numbers into the same place by atomics on CUDA.

    The list is that of `torch.use_deterministic_algorithms`. Ops that scatter are harmless where all indices differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = func.overloadpacket
        if isinstance(args[0] if args else None, Tensor) and args[0].is_floating_point():
            if op in _ALWAYS or (op in _PLACE_OF_INDEX and _repeats(op, args[1], args[2])):
                self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def _repeats(op: Any, dim: int, index: Tensor) -> bool:
    if _PLACE_OF_INDEX[op] == "rows":
        return index.unique().numel() < index.numel()
    ordered = index.sort(dim).values
    return bool((ordered.diff(dim=dim) == 0).any())
