"""Computes the experts of an MoE layer (`numerics.ops.experts`, `numerics.ops.grouped`) without a wait for the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.backend.dispatch import OPS
from fp8rl.numerics.kernels.gates import swiglu_backward, swiglu_quantize
from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.grouped import grouped_wgrad, grouped_wgrad_matmul
from fp8rl.numerics.kernels.products.operands import backward_operands
from fp8rl.numerics.kernels.products.pairs import Combine, combine_rows, gather_by_expert
from fp8rl.numerics.kernels.products.tiles import TALL, Tiles, make_tiles, tile_height
from fp8rl.numerics.kernels.quantize import quantize_rows
from fp8rl.numerics.ops.experts import ExpertWeights
from fp8rl.numerics.ops.grouped import Gradients
from fp8rl.numerics.ops.linear import Backward
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import QuantSpec

_MANY_PAIRS = 1 << 18
"""With more the definition sorts them: each program of the kernel counts all of them."""


def experts(
    x: Tensor,
    counts: Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    spec: QuantSpec | None = None,
    backward: Backward = "fp8",
) -> Tensor:
    """Compute `numerics.ops.experts`. If all products are FP8, the kernel of SwiGLU also quantizes its result."""
    if spec is None or not _fused(w13, w2, backward):
        return OPS["experts"](x, counts, w13, w2, spec, backward)
    tiles = make_tiles(counts.to(x.device), len(x), _height(len(x), counts.numel()))
    rows = quantize_rows(x, spec.activation)
    return _Experts.apply(x, rows, tiles, None, spec, w13, w2, w13.weights, w2.weights)


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
    """Compute `numerics.ops.routed_experts`. If all products are FP8, tokens are quantized first, and then one kernel
    sorts them by expert."""
    if spec is None or not _fused(w13, w2, backward) or not 0 < chosen.numel() <= _MANY_PAIRS:
        return OPS["routed_experts"](x, probs, chosen, w13, w2, spec, backward)
    experts = len(w13.weights)
    rows = quantize_rows(x, spec.activation) if rows is None else rows
    rows, *pairs, tiles = gather_by_expert(rows, chosen, experts, _height(chosen.numel(), experts))
    outputs = _Experts.apply(x, rows, tiles, pairs, spec, w13, w2, w13.weights, w2.weights)
    return Combine.apply(outputs, probs.contiguous(), pairs[0], x.dtype)


def _fused(w13: ExpertWeights, w2: ExpertWeights, backward: Backward) -> bool:
    """Return whether all products are FP8, so that the kernel of SwiGLU can also quantize its result."""
    all_fp8 = all(each.operand is not None and each.low_rank is None for each in (w13, w2))
    return all_fp8 and (backward == "fp8" or not torch.is_grad_enabled())


def _height(rows: int, experts: int) -> int:
    """Return the height of tiles for this number of rows, by the mean number of rows of an expert. Gradients sum over
    tall tiles."""
    return TALL if torch.is_grad_enabled() else tile_height(-(-rows // max(experts, 1)))


def grouped_product(
    x: Tensor, spans: Tiles, operand: Any, spec: QuantSpec | None, n: int, plus: Tensor | None
) -> Tensor:
    if spec is None:
        return gemm(x, operand, x.dtype, plus=plus, tiles=spans)
    return gemm(quantize_rows(x, spec.activation), operand.codes, x.dtype, plus=plus, tiles=spans)


def grouped_gradients(
    dy: Tensor,
    x: Tensor | None,
    spans: Tiles,
    operand: Any,
    spec: QuantSpec | None,
    backward: Backward,
    gradients: Gradients,
) -> tuple[Tensor, Tensor | None]:
    dtype = dy.dtype
    if spec is not None and backward == "fp8":
        return _gradients(dy, x, operand, spec, spans, gradients)
    plain = operand if spec is None else operand.dequantized()
    dy = dy.contiguous()
    dx = gemm(dy, plain.transpose(1, 2).contiguous().to(dtype), dtype, tiles=spans)
    if x is None:
        return dx, None
    rows = x if spec is None else quantize_rows(x, spec.activation).dequantize(dtype)
    return dx, _weight_gradients(grouped_wgrad_matmul, dy, rows, spans, gradients)


class _Experts(torch.autograd.Function):
    """Computes the experts of quantized rows [R, H] that are sorted by expert. x: what was quantized: [R, H], or with
    `pairs` (row_of and token_of of `gather_by_expert`) the tokens [T, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: QuantizedTensor,
        tiles: Tiles,
        pairs: tuple[Tensor, Tensor] | None,
        spec: QuantSpec,
        w13: ExpertWeights,
        w2: ExpertWeights,
        *weights: Tensor,
    ) -> Tensor:
        gate_up = gemm(rows, w13.operand.codes, x.dtype, tiles=tiles)
        ctx.save_for_backward(x if ctx.needs_input_grad[7] else None, gate_up)
        ctx.tiles, ctx.pairs, ctx.spec, ctx.weights = tiles, pairs, spec, (w13, w2)
        return gemm(swiglu_quantize(gate_up, spec.activation), w2.operand.codes, x.dtype, tiles=tiles)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (x, gate_up), (w13, w2), (row_of, token_of) = ctx.saved_tensors, ctx.weights, ctx.pairs or (None, None)

        def gradients(dy: Tensor, x: Tensor | None, w: ExpertWeights, **forms: Any) -> tuple[Tensor, Tensor | None]:
            return _gradients(dy, x, w.operand, ctx.spec, ctx.tiles, Gradients.of(w.weights), **forms)

        dhidden, dw2 = gradients(grads[0], gate_up if ctx.needs_input_grad[8] else None, w2, gated=True)
        dhidden = swiglu_backward(gate_up, dhidden) if x is None else dhidden
        dx, dw13 = gradients(dhidden, x, w13, gate_up=gate_up, token_of=token_of)
        dx = dx if row_of is None else combine_rows(dx, None, row_of, dx.dtype)
        return dx, *(None,) * 6, dw13, dw2


def _gradients(
    dy: Tensor, x: Tensor | None, operand: Any, spec: QuantSpec, tiles: Tiles, gradients: Gradients, **forms: Any
) -> tuple[Tensor, Tensor | None]:
    """Return dx [T, K] of a grouped FP8 product from dy [T, N], and the weights' gradient as `_weight_gradients` does.
    x: None if the weights are frozen. forms: as in `backward_operands` if there is an x."""
    if x is None:
        return gemm(quantize_rows(dy, spec.gradient), operand.transposed, dy.dtype, tiles=tiles), None
    dy_rows, dy_columns, columns = backward_operands(dy, x, spec, tiles, **forms)
    dx = gemm(dy_rows, operand.transposed, dy.dtype, tiles=tiles)
    return dx, _weight_gradients(grouped_wgrad, dy_columns, columns, tiles, gradients)


def _weight_gradients(
    product: Callable[..., Tensor], dy: Any, x: Any, tiles: Tiles, gradients: Gradients
) -> Tensor | None:
    """Return the weights' gradient as `Gradients` says, by a `grouped_wgrad` or a `grouped_wgrad_matmul`."""
    found = product(dy, x, tiles, gradients.dtype, gradients.total)
    return found if gradients.total is None else None
