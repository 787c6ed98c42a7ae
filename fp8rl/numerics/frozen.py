"""Operands of frozen weights: codes and scales alone, wherever they lie.

A trained weight has copies beside it, which its products and its gradients take. A frozen weight is multiplied from its
codes; every other form is made in the call that needs it, and dropped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fp8rl.numerics.quantize import QuantizedTensor

_ATTRIBUTE = "frozen_operand"


def freeze(parameter: torch.nn.Parameter, frozen: Frozen) -> None:
    """Reduce a parameter to its shape and dtype, and let products take `frozen` in its place.

    The parameter's memory is given up: a read of it gives NaN.
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

    The codes may belong to somebody else, who has the rows in another order or has more of them.
    """

    held: QuantizedTensor
    """The codes and scales, of which the product may take a part."""
    order: Tensor | None = None
    """The blocks of rows that the product takes, one after the other; None: all, as they stand."""
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
        codes = self.codes
        data = codes.data.view(torch.uint8).transpose(-1, -2).contiguous().view(codes.data.dtype)
        return QuantizedTensor(data, codes.scale_inv.transpose(-1, -2).contiguous(), codes.spec)

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

    def columns(self, part: int, parts: int) -> Frozen:
        """Return slice `part` of `parts` equal slices of K, each of whole blocks of scales."""
        data, scales = (x.chunk(parts, -1) for x in (self.held.data, self.held.scale_inv))
        return dataclasses.replace(self, held=QuantizedTensor(data[part], scales[part], self.held.spec))

    def chunk(self, parts: int, axis: int) -> list[Frozen]:
        """Return all slices of K (axis -1), as torch cuts a tensor."""
        assert axis == -1, axis
        return [self.columns(part, parts) for part in range(parts)]


def _rows(x: Tensor, order: Tensor, block: int) -> Tensor:
    """Return the blocks of rows of x [..., N, K] that `order` names."""
    return x.unflatten(-2, (-1, block)).index_select(-3, order).flatten(-3, -2)
