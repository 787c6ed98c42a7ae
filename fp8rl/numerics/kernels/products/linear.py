"""Computes the products of `numerics.ops.linear` from FP8 codes on the tensor core, forward and backward."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.kernels.norm import rms_norm_backward, rms_norm_forward, rms_norm_quantize
from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.operands import backward_operands
from fp8rl.numerics.kernels.quantize import quantize_both_ways, quantize_rows
from fp8rl.numerics.ops.linear import Backward, wide_mm
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import QuantSpec, TensorSpec


@dataclasses.dataclass(frozen=True)
class WeightOperand:
    """A quantized weight, or the stacked weights of all experts, as FP8 products take it: the codes themselves."""

    codes: QuantizedTensor
    """data [..., N, K], scale_inv [..., N / 128, K / 128]. In an engine they are its parameters, not a copy."""
    quantized_transpose: QuantizedTensor | None = None
    """The transposed codes, data [..., K, N], of a weight that is trained; None: they are made when they are needed."""

    @functools.cached_property
    def transposed(self) -> QuantizedTensor:
        """Return [..., K, N], for the gradient of the input."""
        return self.codes.transposed() if self.quantized_transpose is None else self.quantized_transpose

    def chunk(self, slices: int, axis: int) -> list[WeightOperand]:
        """Return equal slices of K (axis -1), each of whole blocks of scales."""
        assert axis == -1, axis
        codes, other = self.codes.chunk(slices, axis), self.quantized_transpose
        return list(map(WeightOperand, codes, [None] * slices if other is None else other.chunk(slices, -2)))

    def dequantized(self) -> Tensor:
        """Return [..., N, K], for gradients in BF16; not kept."""
        return self.codes.dequantize()


def weight_operand(quantized: QuantizedTensor, former: WeightOperand | None = None) -> WeightOperand:
    return WeightOperand(quantized)


def trained_operand(weight: Tensor, spec: TensorSpec) -> WeightOperand:
    """Make `numerics.ops.trained_operand`: codes and their transpose in one pass, for all experts in one launch."""
    return WeightOperand(*quantize_both_ways(weight, spec))


def linear(x: Tensor, weight: Tensor, k_splits: int = 1, plus: Tensor | None = None) -> Tensor:
    return _Linear.apply(x, weight, x.dtype, k_splits, plus)


def linear_partial(x: Tensor, weight: Tensor) -> Tensor:
    return _Linear.apply(x, weight, torch.float32, 1, None)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    operand: WeightOperand,
    spec: QuantSpec,
    backward: Backward = "fp8",
    k_splits: int = 1,
    plus: Tensor | None = None,
) -> Tensor:
    return _Fp8Linear.apply(x, None, weight, operand, spec, backward, x.dtype, k_splits, 0.0, plus)


def fp8_linear_partial(
    x: Tensor, weight: Tensor, operand: WeightOperand, spec: QuantSpec, backward: Backward = "fp8"
) -> Tensor:
    return _Fp8Linear.apply(x, None, weight, operand, spec, backward, torch.float32, 1, 0.0, None)


def norm_fp8_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    operand: WeightOperand,
    spec: QuantSpec,
    backward: Backward = "fp8",
) -> Tensor:
    """Compute `numerics.ops.norm_fp8_linear`. One kernel computes and quantizes the norm; the backward repeats it."""
    return _Fp8Linear.apply(x, norm_weight, weight, operand, spec, backward, x.dtype, 1, eps, None)


def rows_linear(
    rows: QuantizedTensor, operand: WeightOperand, dtype: torch.dtype, plus: Tensor | None = None
) -> Tensor:
    return gemm(rows, operand.codes, dtype, 1, _rows(plus, operand.codes.data))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype, k_splits: int, plus: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        if rows.dtype != weight.dtype:
            rows, weight = rows.float(), weight.float()
        return gemm(rows, weight, dtype, k_splits, _rows(plus, weight)).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows, weight = ctx.saved_tensors
        dy = grads[0].reshape(-1, weight.shape[0]).to(ctx.dtype)
        dx = wide_mm(dy, weight).to(ctx.dtype).view(ctx.shape) if ctx.needs_input_grad[0] else None
        dw = wide_mm(dy.t(), rows).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None, grads[0] if ctx.needs_input_grad[4] else None


class _Fp8Linear(torch.autograd.Function):
    """Computes the product of x, or of its norm if there is a norm_weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        weight: Tensor,
        operand: WeightOperand,
        spec: QuantSpec,
        backward: Backward,
        dtype: torch.dtype,
        k_splits: int,
        eps: float,
        plus: Tensor | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if norm_weight is None:
            quantized, inverse_rms = quantize_rows(rows, spec.activation), None
        else:
            quantized, inverse_rms = rms_norm_quantize(rows, norm_weight, eps, spec.activation)
        kept = rows if norm_weight is not None or ctx.needs_input_grad[2] else None
        ctx.save_for_backward(kept, norm_weight, inverse_rms)
        ctx.operand, ctx.spec, ctx.backward, ctx.eps = operand, spec, backward, eps
        ctx.shape, ctx.dtype, ctx.weight_dtype = x.shape, x.dtype, weight.dtype
        return gemm(quantized, operand.codes, dtype, k_splits, _rows(plus, weight)).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows, norm_weight, inverse_rms = ctx.saved_tensors
        spec: QuantSpec = ctx.spec
        dy = grads[0].reshape(-1, grads[0].shape[-1]).to(ctx.dtype)
        trained = ctx.needs_input_grad[2]
        dw = dnorm = None
        if ctx.backward == "fp8":
            if trained:
                norm = None if norm_weight is None else (norm_weight, inverse_rms)
                dy_rows, dy_columns, columns = backward_operands(dy, rows, spec, norm=norm)
                dw = gemm(dy_columns, columns, ctx.weight_dtype)
            else:
                dy_rows = quantize_rows(dy, spec.gradient)
            dx = gemm(dy_rows, ctx.operand.transposed, ctx.dtype)
        else:
            dx = wide_mm(dy, ctx.operand.dequantized()).to(ctx.dtype)
            if trained:
                inputs = rows if norm_weight is None else rms_norm_forward(rows, norm_weight, ctx.eps)
                dw = wide_mm(dy.t(), quantize_rows(inputs, spec.activation).dequantize()).to(ctx.weight_dtype)
        if norm_weight is not None:
            dx, dnorm = rms_norm_backward(dx, rows, norm_weight, ctx.eps)
        return dx.view(ctx.shape), dnorm, dw, *(None,) * 6, grads[0] if ctx.needs_input_grad[9] else None


def _rows(plus: Tensor | None, weight: Tensor) -> Tensor | None:
    """Return plus [..., N] as a matrix of rows."""
    return None if plus is None else plus.reshape(-1, weight.shape[0]).contiguous()
