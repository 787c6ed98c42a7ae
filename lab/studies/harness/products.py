"""Matrix products of studies: in accumulators of FP8 kernels (FP32, Hopper's 13 bits, and 13 bits moved to FP32 in
time), and every quantized product of a model's forward and backward, taken by a kernel of one's choice and recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fp8rl.numerics.ops.linear import Backward, product
from fp8rl.numerics.quantize import fake_quantize_columns, fake_quantize_rows
from fp8rl.numerics.spec import QuantSpec

INSTRUCTION_K = 32
"""Products along K that one FP8 instruction of Hopper adds before it rounds."""
PROMOTED_EVERY = 128
FP22_DROPPED_BITS = 10
"""Hopper's accumulator keeps 13 of FP32's 23 bits of mantissa (DeepSeek-V3's report, 3.3.2)."""


def in_fp32(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K] @ w [N, K]^T, added in FP32."""
    return x.float() @ w.float().t()


def in_fp22(x: Tensor, w: Tensor) -> Tensor:
    """The same in an accumulator of 13 bits, which is cut off after every 32 products.

    The products of one instruction are added exactly here; the hardware aligns and cuts them too, so this is the
    smallest error that such an accumulator makes.
    """
    total = x.new_zeros(x.shape[0], w.shape[0], dtype=torch.float32)
    for a, b in zip(x.float().split(INSTRUCTION_K, 1), w.float().split(INSTRUCTION_K, 1), strict=True):
        total += a @ b.t()
        total.view(torch.int32).bitwise_and_(-1 << FP22_DROPPED_BITS)
    return total


def promoted(x: Tensor, w: Tensor) -> Tensor:
    """`in_fp22` whose sum moves to FP32 after every 128 products, as DeepGEMM's and this project's kernels do."""
    parts = zip(x.split(PROMOTED_EVERY, 1), w.split(PROMOTED_EVERY, 1), strict=True)
    total = x.new_zeros(x.shape[0], w.shape[0], dtype=torch.float32)
    for a, b in parts:
        total += in_fp22(a, b)
    return total


Role = Literal["fprop", "dgrad", "wgrad"]
ROLES: tuple[Role, ...] = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class Operands:
    """The operands of one product a [M, K] @ b [N, K]^T: as they came, in BF16, and as they are quantized."""

    role: Role
    weight: Tensor
    """The parameter that is multiplied with, or whose gradient this is."""
    a: Tensor
    b: Tensor
    quantized_a: Tensor
    quantized_b: Tensor


Take = Callable[[Operands], Tensor]
"""Takes a product; what it returns, rounded to BF16, is what the model goes on with."""
Probe = Callable[[Operands], Mapping[str, float]]
"""Measures something of a product."""


def library(a: Tensor, b: Tensor) -> Tensor:
    """The matrix library's product of BF16 operands, as `ops.linear` takes it."""
    return product(a, b, torch.bfloat16)


@dataclass
class ProductRecorder:
    """Takes products, and keeps what comes out in the order in which they are taken.

    Products with an operand of zeros, such as those of an expert whose tokens have no gradient, are not kept.
    """

    take: Take
    probe: Probe | None = None
    """Asked about each product that is kept."""
    roles: list[Role] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    measured: list[Mapping[str, float]] = field(default_factory=list)
    """The probe's answers."""

    def __call__(self, operands: Operands) -> Tensor:
        out = self.take(operands).bfloat16()
        if operands.a.any() and operands.b.any():
            self.roles.append(operands.role)
            self.weights.append(operands.weight)
            self.outputs.append(out)
            if self.probe:
                self.measured.append(self.probe(operands))
        return out

    def ops(self) -> dict[str, Callable[..., Tensor]]:
        """The quantized products among the ops, in place of `numerics.ops`' own; experts' are taken one by one."""

        def fp8_linear(
            x: Tensor, weight: Tensor, operand: Any, spec: QuantSpec, backward: Backward = "fp8", k_splits: int = 1
        ) -> Tensor:
            out: Tensor = _Taken.apply(x.reshape(-1, x.shape[-1]), weight, operand, spec, self)
            return out.reshape(*x.shape[:-1], -1)

        def grouped_linear(
            x: Tensor,
            counts: Tensor,
            weights: Tensor,
            operand: Any = None,
            spec: QuantSpec | None = None,
            backward: Backward = "fp8",
        ) -> Tensor:
            groups = zip(x.split(counts.tolist()), weights, operand, strict=True)
            taken: list[Tensor] = [_Taken.apply(rows, *pair, spec, self) for rows, *pair in groups if len(rows)]
            return torch.cat(taken)

        return {"fp8_linear": fp8_linear, "grouped_linear": grouped_linear}


class _Taken(torch.autograd.Function):
    """The three products of `ops.fp8_linear` with its backward in FP8: x [T, K] by weight [N, K]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, operand: Tensor, spec: QuantSpec, take: Take) -> Tensor:
        ctx.save_for_backward(x, weight, operand)
        ctx.spec, ctx.take = spec, take
        return take(Operands("fprop", weight, x, weight, fake_quantize_rows(x, spec.activation), operand))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, operand = ctx.saved_tensors
        spec, take, dy = ctx.spec, ctx.take, grads[0]
        dy_rows = fake_quantize_rows(dy, spec.gradient)
        dx = take(Operands("dgrad", weight, dy, weight.t(), dy_rows, operand.t()))
        dy_columns, columns = fake_quantize_columns(dy, spec.gradient), fake_quantize_columns(x, spec.activation)
        dw = take(Operands("wgrad", weight, dy.t(), x.t(), dy_columns.t(), columns.t()))
        return dx, dw, None, None, None
