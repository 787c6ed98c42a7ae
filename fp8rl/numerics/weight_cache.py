"""Caches quantized weights in the form that products take. They are made once per weight version.

Optimizers and checkpoint loaders write weights in place without bumping torch's own version counter. So code that
changes the weights calls `drop`, which drops everything that was made from the older version.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec


class WeightCache:
    """The weights of one model in the form that its products take, on one process."""

    def __init__(self) -> None:
        self._operands: dict[tuple[Tensor, TensorSpec], Any] = {}
        self._made: dict[Tensor, Callable[[], Tensor]] = {}
        self._plain: dict[Tensor, Tensor] = {}

    def serve(self, weight: Tensor, make: Callable[[], Tensor]) -> None:
        """Use the result of `make` in place of a parameter, which then gets no gradient."""
        self._made[weight] = make

    def drop(self) -> None:
        """Drop everything cached, because the weights have changed."""
        self._operands.clear()
        self._plain.clear()

    def operands(self) -> Iterator[tuple[Tensor, Any]]:
        """Yield each weight of a product at this version, and its operand."""
        yield from ((weight, operand) for (weight, _), operand in self._operands.items())
        yield from self._plain.items()

    def served(self, weight: Tensor) -> Tensor:
        """Compute the weight that is used in place of a parameter.

        Quantized products take this weight, and a sync sends it. It is the parameter itself, or the dequantized codes
        of a frozen parameter, or the result of the function that was given to `serve`.
        """
        if (make := self._made.get(weight)) is not None:
            return make()
        frozen = frozen_of(weight)
        return weight.detach() if frozen is None else frozen.dequantized().to(weight.dtype)

    def plain(self, weight: Tensor) -> Tensor:
        """Return the weight of an unquantized product: the parameter itself, so that it gets a gradient, or `served`,
        computed once per version."""
        if weight not in self._made and frozen_of(weight) is None:
            return weight
        if weight not in self._plain:
            self._plain[weight] = self.served(weight)
        return self._plain[weight]

    def operand(self, weight: Tensor, spec: TensorSpec) -> Any:
        """Return `ops.trained_operand` of the served weight, or the `Frozen` of a frozen weight."""
        if (frozen := frozen_of(weight)) is not None:
            return frozen
        if (weight, spec) not in self._operands:
            self._operands[weight, spec] = ops.trained_operand(self.served(weight), spec)
        return self._operands[weight, spec]


# Operands of frozen weights: only codes and scales, in whatever memory they are.
#
# A trained weight also has copies for its products and its gradients. A frozen weight has none: each call reads its
# codes, makes another form from them if it needs one, and drops it.

_ATTRIBUTE = "frozen_operand"


def freeze(parameter: torch.nn.Parameter, frozen: Frozen) -> None:
    """Free a parameter's memory, so that reading it gives NaN, and let products take `frozen` in its place.

    The parameter keeps its shape and dtype.
    """
    parameter.requires_grad_(False)
    parameter.data = parameter.data.new_full((), math.nan).expand(parameter.shape)
    setattr(parameter, _ATTRIBUTE, frozen)


def frozen_of(parameter: Tensor) -> Frozen | None:
    """Return the operand of a frozen parameter; None for a parameter that is not frozen."""
    return getattr(parameter, _ATTRIBUTE, None)


@dataclasses.dataclass(frozen=True)
class Frozen:
    """The operand of a frozen weight [N, K], or of a stack of them [experts, N, K].

    The codes may be in memory that is shared with engines, with the rows in another order and with more rows.
    """

    held: QuantizedTensor
    """The codes and scales. The product may take only some of their rows."""
    order: Tensor | None = None
    """Indices of the blocks of rows that the product takes, in this order; None: all rows, in the order of `held`."""
    block: int = 1
    """Rows in a block of `order`."""

    @property
    def codes(self) -> QuantizedTensor:
        """Return the weight as the product takes it, without a copy if its rows are in order."""
        if self.order is None:
            return self.held
        data = _rows(self.held.data.view(torch.uint8), self.order, self.block).view(self.held.data.dtype)
        blocks = self.held.data.shape[-2] // self.block
        scales = _rows(self.held.scale_inv, self.order, self.held.scale_inv.shape[-2] // blocks)
        return QuantizedTensor(data, scales, self.held.spec)

    @property
    def transposed(self) -> QuantizedTensor:
        """Return [..., K, N], for a gradient of the input in FP8."""
        return self.codes.transposed()

    def dequantized(self) -> Tensor:
        """Return [..., N, K], exact."""
        return self.codes.dequantize()

    def __len__(self) -> int:
        return len(self.held.data)

    def __iter__(self) -> Iterator[Frozen]:
        """Yield the operand of each matrix of a stack."""
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int | slice) -> Frozen:
        """Return the operand of one matrix of a stack, or of a part of the stack."""
        held = QuantizedTensor(self.held.data[index], self.held.scale_inv[index], self.held.spec)
        return dataclasses.replace(self, held=held)

    def chunk(self, parts: int, axis: int) -> list[Frozen]:
        """Return equal slices of K (axis -1), each of whole blocks of scales."""
        assert axis == -1, axis
        return [dataclasses.replace(self, held=held) for held in self.held.chunk(parts, axis)]


def _rows(x: Tensor, order: Tensor, block: int) -> Tensor:
    """Return the blocks of rows of x [..., N, K] that `order` names."""
    return x.unflatten(-2, (-1, block)).index_select(-3, order).flatten(-3, -2)
