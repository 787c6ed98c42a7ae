"""Computes the experts of an MoE layer (`numerics.ops.experts`, `numerics.ops.grouped`) without a wait for the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.kernels.gates import swiglu_backward, swiglu_forward, swiglu_quantize
from fp8rl.numerics.kernels.products.grouped import grouped_gemm, grouped_wgrad, grouped_wgrad_matmul
from fp8rl.numerics.kernels.products.linear import WeightOperand
from fp8rl.numerics.kernels.products.pairs import combine_rows, gather_by_expert
from fp8rl.numerics.kernels.products.tiles import Tiles, make_tiles, tile_height
from fp8rl.numerics.kernels.quantize import quantize_columns, quantize_rows, quantize_rows_and_columns
from fp8rl.numerics.ops.experts import ExpertWeights, adapted_grouped_linear, routed_in_steps
from fp8rl.numerics.ops.gates import swiglu
from fp8rl.numerics.ops.grouped import Gradients
from fp8rl.numerics.ops.linear import Backward
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import QuantSpec


def experts(
    x: Tensor,
    counts: Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    spec: QuantSpec | None = None,
    backward: Backward = "fp8",
) -> Tensor:
    """Compute `numerics.ops.experts`. If all products are FP8, the kernel of SwiGLU also quantizes its result."""
    fused = backward == "fp8" or not torch.is_grad_enabled()
    if spec is None or not fused or not _all_fp8(w13, w2):
        hidden = swiglu(adapted_grouped_linear(x, counts, w13, spec, backward))
        return adapted_grouped_linear(hidden, counts, w2, spec, backward)
    if not torch.is_grad_enabled():
        tiles = make_tiles(counts.to(x.device), len(x), _height(len(x), counts.numel()))
        return _forward(x, tiles, spec, w13.operand, w2.operand)[0]
    gradients = [Gradients.of(each.weights) for each in (w13, w2)]
    return _Experts.apply(x, counts, spec, w13.operand, w2.operand, *gradients, w13.weights, w2.weights)


def routed_experts(
    x: Tensor,
    probs: Tensor,
    chosen: Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    spec: QuantSpec | None = None,
    backward: Backward = "fp8",
    rows: QuantizedTensor | None = None,
) -> Tensor:
    """Compute `numerics.ops.routed_experts`. If all products are FP8 and nothing has a gradient, tokens are quantized
    first, and then one kernel sorts them by expert."""
    if spec is None or torch.is_grad_enabled() or not _all_fp8(w13, w2) or not len(x):
        return routed_in_steps(x, probs, chosen, w13, w2, spec, backward)
    experts = len(w13.weights)
    rows = quantize_rows(x, spec.activation) if rows is None else rows
    rows, row_of, tiles = gather_by_expert(rows, chosen, experts, _height(chosen.numel(), experts))
    out = _products(rows, tiles, spec, w13.operand, w2.operand, x.dtype)[0]
    return combine_rows(out, probs.contiguous(), row_of, x.dtype)


def _all_fp8(*weights: ExpertWeights) -> bool:
    return all(each.operand is not None and each.low_rank is None for each in weights)


def _height(rows: int, experts: int) -> int:
    """Return the height of tiles for this number of rows, by the mean number of rows of an expert."""
    return tile_height(-(-rows // max(experts, 1)))


def grouped_product(
    x: Tensor, spans: Tiles, operand: Any, spec: QuantSpec | None, n: int, plus: Tensor | None
) -> Tensor:
    if spec is None:
        return grouped_gemm(x, operand, spans, x.dtype, plus)
    return grouped_gemm(quantize_rows(x, spec.activation), operand.codes, spans, x.dtype, plus)


def grouped_gradients(
    dy: Tensor,
    x: Tensor | None,
    spans: Tiles,
    operand: Any,
    spec: QuantSpec | None,
    backward: Backward,
    gradients: Gradients,
) -> tuple[Tensor, Tensor | None]:
    dy, dtype = dy.contiguous(), dy.dtype
    if spec is not None and backward == "fp8":
        if x is None:
            return grouped_gemm(quantize_rows(dy, spec.gradient), operand.transposed, spans, dtype), None
        return _gradients(dy, quantize_columns(x, spec.activation, spans), operand, spec, spans, dtype, gradients)
    plain = operand if spec is None else operand.dequantized()
    dx = grouped_gemm(dy, plain.transpose(1, 2).contiguous().to(dtype), spans, dtype)
    if x is None:
        return dx, None
    rows = x if spec is None else quantize_rows(x, spec.activation).dequantize(dtype)
    return dx, _weight_gradients(grouped_wgrad_matmul, dy, rows, spans, gradients)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        counts: Tensor,
        spec: QuantSpec,
        w13: WeightOperand,
        w2: WeightOperand,
        gradients13: Gradients,
        gradients2: Gradients,
        *weights: Tensor,
    ) -> Tensor:
        tiles = make_tiles(counts.to(x.device), len(x))
        out, gate_up = _forward(x, tiles, spec, w13, w2)
        ctx.save_for_backward(x, gate_up)
        ctx.tiles, ctx.spec, ctx.w13, ctx.w2, ctx.gradients = tiles, spec, w13, w2, (gradients13, gradients2)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, gate_up = ctx.saved_tensors
        spec, tiles = ctx.spec, ctx.tiles
        hidden = quantize_columns(swiglu_forward(gate_up), spec.activation, tiles)
        gradients13, gradients2 = ctx.gradients
        dhidden, dw2 = _gradients(grads[0], hidden, ctx.w2, spec, tiles, x.dtype, gradients2)
        dgate_up = swiglu_backward(gate_up, dhidden)
        inputs = quantize_columns(x, spec.activation, tiles)
        dx, dw13 = _gradients(dgate_up, inputs, ctx.w13, spec, tiles, x.dtype, gradients13)
        return dx, *(None,) * 6, dw13, dw2


def _forward(x: Tensor, tiles: Tiles, spec: QuantSpec, w13: WeightOperand, w2: WeightOperand) -> tuple[Tensor, Tensor]:
    """Return the experts' outputs [T, H], and the input of SwiGLU [T, 2F]."""
    return _products(quantize_rows(x, spec.activation), tiles, spec, w13, w2, x.dtype)


def _products(
    rows: QuantizedTensor, tiles: Tiles, spec: QuantSpec, w13: WeightOperand, w2: WeightOperand, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    gate_up = grouped_gemm(rows, w13.codes, tiles, dtype)
    return grouped_gemm(swiglu_quantize(gate_up, spec.activation), w2.codes, tiles, dtype), gate_up


def _gradients(
    dy: Tensor,
    columns: Any,
    operand: WeightOperand,
    spec: QuantSpec,
    tiles: Tiles,
    dtype: torch.dtype,
    gradients: Gradients,
) -> tuple[Tensor, Tensor | None]:
    """Return dx [T, K] of a grouped FP8 product from dy [T, N], and the weights' gradient as `_weight_gradients` does.
    columns: the product's input, quantized along the tokens."""
    dy_rows, dy_columns = quantize_rows_and_columns(dy.contiguous(), spec.gradient, spec.gradient, tiles)
    dx = grouped_gemm(dy_rows, operand.transposed, tiles, dtype)
    return dx, _weight_gradients(grouped_wgrad, dy_columns, columns, tiles, gradients)


def _weight_gradients(
    product: Callable[..., Tensor], dy: Any, x: Any, tiles: Tiles, gradients: Gradients
) -> Tensor | None:
    """Return the weights' gradient as `Gradients` says, by a `grouped_wgrad` or a `grouped_wgrad_matmul`."""
    found = product(dy, x, tiles, gradients.dtype, gradients.total)
    return found if gradients.total is None else None
