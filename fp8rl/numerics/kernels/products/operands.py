"""Quantizes what the products of a backward pass multiply, in one launch, with the bits of `numerics.quantize`.

A weight's gradient sums over the tokens, so dy and the product's input are quantized along them as well, and stored
transposed: Hopper's FP8 products read both operands along the axis of the sum. If dy or the input follows from other
tensors element by element, it is computed as they are loaded, with the bits of the kernel that computes it alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import GROUP, absolute, cast, dense_rows, encode, inverse, scale_from_amax
from fp8rl.numerics.kernels.gates import swiglu_backward, swiglu_gradient, swiglu_of
from fp8rl.numerics.kernels.norm import times_weight
from fp8rl.numerics.kernels.products.tiles import TALL, Tiles
from fp8rl.numerics.kernels.quantize import empty_rows, format_constants
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import QuantSpec


def backward_operands(
    dy: Tensor,
    x: Tensor,
    spec: QuantSpec,
    tiles: Tiles | None = None,
    *,
    norm: tuple[Tensor, Tensor] | None = None,
    token_of: Tensor | None = None,
    gated: bool = False,
    gate_up: Tensor | None = None,
) -> tuple[QuantizedTensor, QuantizedTensor, QuantizedTensor]:
    """Quantize dy [T, N] in groups of 128 along N, then dy and the product's input [T, K] in groups of 128 along T.

    Return codes [T, N], [N, T'] and [K, T']. T' is T in whole groups, filled up with zeros. tiles: the tiles of rows
    that are sorted by expert. Groups then begin again in each expert, and group i holds the rows of tile i.

    The input is x; with `norm` (a norm's weight [K] and 1 / rms(x), FP32 [T]) the norm of x; with token_of, int64 [T],
    the rows token_of of x; if `gated` SwiGLU of x [T, 2K]. With gate_up [T, N], which is contiguous, dy [T, N / 2] is
    the gradient of its SwiGLU, and the gradient of gate_up is quantized in place of dy.
    """
    if gate_up is not None and gate_up.shape[1] % (2 * TALL):  # a group would have features of gate and of up
        dy, gate_up = swiglu_backward(gate_up, dy), None
    (tokens, n), k = (dy if gate_up is None else gate_up).shape, x.shape[1] // 2 if gated else x.shape[1]
    groups = -(-tokens // TALL) if tiles is None else tiles.expert.numel()
    rows = empty_rows((tokens, n), spec.gradient, dy.device)
    of_dy = empty_rows((n, groups * TALL), spec.gradient, dy.device)
    of_x = empty_rows((k, groups * TALL), spec.activation, dy.device)
    if groups:
        dy, x = dense_rows(dy), dense_rows(x)
        _operands_kernel[-(-n // TALL) + -(-k // TALL), groups](
            *(dy, x, gate_up, *(norm or (None, None)), token_of, rows.data, rows.scale_inv),
            *(of_dy.data, of_dy.scale_inv, of_x.data, of_x.scale_inv),
            *((tiles.first, tiles.rows) if tiles else (None, None)),
            *(tokens, n, k, dy.stride(0), x.stride(0)),
            GATED=gated,
            **format_constants(spec.gradient),
            **{f"X_{name}": value for name, value in format_constants(spec.activation).items()},
            num_warps=16,
            maxnreg=64,
            enable_fp_fusion=False,
        )
    return rows, of_dy, of_x


@triton.jit(do_not_specialize=["first_ptr", "filled_ptr", "tokens"])
def _operands_kernel(
    dy_ptr, x_ptr, gate_up_ptr, weight_ptr, inverse_ptr, token_ptr, codes_ptr, scale_ptr,
    dy_codes_ptr, dy_scale_ptr, x_codes_ptr, x_scale_ptr, first_ptr, filled_ptr, tokens, n, k, dy_stride, x_stride,
    GATED: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr, FIXED: tl.constexpr,
    X_E5M2: tl.constexpr, X_POW2: tl.constexpr, X_FIXED: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of 128 tokens and 128 features, of dy or behind it of the input."""
    block, tile, lane = tl.program_id(0), tl.program_id(1), tl.arange(0, GROUP)
    first, filled = tile * GROUP, tokens - tile * GROUP
    if first_ptr is not None:
        first, filled = tl.load(first_ptr + tile), tl.load(filled_ptr + tile)
    token, column = lane[:, None], lane[None, :]
    begin, blocks = first.to(tl.int64), tl.cdiv(n, GROUP)
    if block < blocks:
        WIDE: tl.constexpr = dy_ptr.dtype.element_ty == tl.float32
        feature = block * GROUP
        inside = (token < filled) & (column < n - feature)
        if gate_up_ptr is not None:
            half = n // 2
            of_gate = feature < half
            place = tl.where(of_gate, feature, feature - half)
            dhidden = tl.load(dy_ptr + begin * dy_stride + place + token * dy_stride + column, mask=inside, other=0.0)
            start = gate_up_ptr + begin * n + place + token * n + column
            partner = tl.load(start + tl.where(of_gate, half, 0), mask=inside, other=0.0)
            product = dhidden.to(tl.float32) * partner.to(tl.float32)
            gate = tl.load(start, mask=inside, other=0.0)
            dy = cast(swiglu_gradient(gate, product, of_gate), gate.dtype).to(tl.float32)
        else:
            start = dy_ptr + begin * dy_stride + feature + token * dy_stride + column
            dy = tl.load(start, mask=inside, other=0.0).to(tl.float32)
        scale = scale_from_amax(tl.max(absolute(dy), 1), E5M2, POW2, FIXED, WIDE)
        codes = encode(dy * scale[:, None], E5M2)
        tl.store(codes_ptr + begin * n + feature + token * n + column, codes, mask=inside)
        tl.store(scale_ptr + block * tokens + begin + lane, inverse(scale, POW2), mask=lane < filled)
        _store_columns(dy, dy_codes_ptr, dy_scale_ptr, tile, feature, n, E5M2, POW2, FIXED, WIDE)
    else:
        feature = (block - blocks) * GROUP
        inside = (token < filled) & (column < k - feature)
        if token_ptr is not None:
            row = tl.load(token_ptr + begin + token, mask=token < filled, other=0)
            start = x_ptr + row * x_stride + feature + column
        else:
            start = x_ptr + begin * x_stride + feature + token * x_stride + column
        x = tl.load(start, mask=inside, other=0.0)
        if inverse_ptr is not None:
            inverse_rms = tl.load(inverse_ptr + begin + token, mask=token < filled, other=0.0)
            weight = tl.load(weight_ptr + feature + column, mask=column < k - feature, other=0.0)
            x = tl.where(inside, times_weight(x, inverse_rms, weight), 0.0)
        if GATED:
            x = swiglu_of(x, tl.load(start + k, mask=inside, other=0.0))
        X_WIDE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
        _store_columns(x.to(tl.float32), x_codes_ptr, x_scale_ptr, tile, feature, k, X_E5M2, X_POW2, X_FIXED, X_WIDE)


@triton.jit
def _store_columns(
    x, codes_ptr, scale_ptr, tile, feature, features,
    E5M2: tl.constexpr, POW2: tl.constexpr, FIXED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Quantize x [128 tokens, 128 features] along the tokens, and store it transposed. feature: the first one."""
    scale = scale_from_amax(tl.max(absolute(x), 0), E5M2, POW2, FIXED, WIDE)
    codes, lane, columns = tl.trans(encode(x * scale[None, :], E5M2)), tl.arange(0, GROUP), tl.num_programs(1) * GROUP
    start = codes_ptr + feature.to(tl.int64) * columns + tile * GROUP
    inside = lane < features - feature
    tl.store(start + lane[:, None] * columns + lane[None, :], codes, mask=inside[:, None])
    tl.store(scale_ptr + tile * features + feature + lane, inverse(scale, POW2), mask=inside)
