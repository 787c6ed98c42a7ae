"""Computes RMSNorm (`numerics.ops.norm`): alone, after a residual add, and with a quantized result.

A row's sum of squares has the same order in every variant, so that fused variants give the bits of the plain norm.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import GROUP, as_rows, cast, pairwise_sum
from fp8rl.numerics.kernels.quantize import empty_rows, encode_groups, format_constants
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec

_ELEMENTS = 4096  # of a program: several short rows (the heads), or one long one
_PROGRAMS = 256  # that share the rows in the backward: two for each multiprocessor


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`numerics.ops.add_rms_norm`, in one pass."""
    return _AddRmsNorm.apply(x, residual, weight, eps)


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float, spec: TensorSpec) -> tuple[QuantizedTensor, Tensor]:
    """Return `quantize(rms_norm(x), spec)` of x [T, H] in groups of 128, and 1 / rms(x), FP32 [T]. No gradient."""
    out = empty_rows(x.shape, spec, x.device)
    _, _, inverse_rms = _launch(x, weight, eps, quantized=out)
    return out, inverse_rms


def norm_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, spec: TensorSpec
) -> tuple[Tensor, Tensor, QuantizedTensor]:
    """`numerics.ops.norm_rows`, in one pass."""
    rows = empty_rows(x.shape, spec, x.device)
    normed, total, _ = _launch(x, weight, eps, residual, rows, kept=True)
    return normed, total, rows


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total, _ = _launch(x, weight, eps, residual=residual)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return normed, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        total, weight = ctx.saved_tensors
        dx, dweight = rms_norm_backward(grads[0], total, weight, ctx.eps, grads[1])
        return dx, dx, dweight, None


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `numerics.ops.norm.rms_norm_backward`, deterministically: each program adds its own rows in order."""
    hidden = x.shape[-1]
    flat, dy = as_rows(x), as_rows(dy)
    dx = torch.empty_like(flat, memory_format=torch.contiguous_format)
    block = _block(hidden)
    programs = min(_PROGRAMS, max(1, -(-len(flat) // block["ROWS"])))
    partial = torch.empty(programs, hidden, dtype=torch.float32, device=x.device)
    other = None if beside is None else beside.reshape(flat.shape).contiguous()
    _backward_kernel[(programs,)](
        *(flat, dy, weight, other, dx, partial), *(len(flat), hidden, flat.stride(0), dy.stride(0), eps), **block
    )
    return dx.view(x.shape), partial.sum(0).to(weight.dtype)


def _launch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    quantized: QuantizedTensor | None = None,
    kept: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (normed, x + residual, 1 / rms). A result that the caller does not need is x.

    quantized: the tensor to write the norm's codes to. The norm itself is then stored only if `kept`.
    """
    hidden = x.shape[-1]
    flat = as_rows(x)
    other = flat if residual is None else residual.reshape(-1, hidden).contiguous()
    total = flat if residual is None else torch.empty_like(other)
    normed = flat if quantized and not kept else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inverse_rms = torch.empty(len(flat), dtype=torch.float32, device=x.device)
    block = _block(hidden)
    if x.numel():
        _forward_kernel[(-(-len(flat) // block["ROWS"]),)](
            *(flat, other, weight, normed, total, inverse_rms),
            *((quantized.data, quantized.scale_inv) if quantized else (normed, inverse_rms)),
            *(len(flat), hidden, flat.stride(0), eps, *(quantized.scale_inv.stride() if quantized else (0, 0))),
            ADD=residual is not None,
            QUANTIZE=quantized is not None,
            KEEP=quantized is None or kept,
            **format_constants(quantized.spec if quantized else None),
            **block,
        )
    return normed, total.view(x.shape), inverse_rms


def _block(hidden: int) -> dict[str, Any]:
    groups = triton.next_power_of_2(-(-hidden // GROUP.value))
    rows = max(1, _ELEMENTS // (groups * GROUP.value))
    # A product fused into a sum is rounded once less, in one variant and perhaps not in another.
    exact = {"enable_fp_fusion": False}
    return {"ROWS": rows, "GROUPS": groups, "num_warps": 8 if groups * GROUP.value > _ELEMENTS else 4, **exact}


@triton.jit
def _sum(x, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """[rows, groups, 128] -> [rows]"""
    return pairwise_sum(tl.reshape(x, (ROWS, COUNT)), COUNT)


@triton.jit
def inverse_rms_of(x, hidden, eps, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """1 / rms of x [rows, groups, 128], which has zeros behind the first `hidden` numbers of a row."""
    wide = x.to(tl.float32)
    return tl.rsqrt(_sum(wide * wide, ROWS, GROUPS * 128) / hidden + eps)


@triton.jit
def times_weight(x, inverse_rms, weight):
    """The normed x, rounded to its dtype."""
    return cast(x.to(tl.float32) * inverse_rms * weight.to(tl.float32), x.dtype)


@triton.jit(do_not_specialize=["rows", "scale_group"])
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, total_ptr, inverse_ptr, codes_ptr, scale_ptr,
    rows, hidden, stride, eps, scale_row, scale_group,
    ADD: tl.constexpr, QUANTIZE: tl.constexpr, KEEP: tl.constexpr,
    E5M2: tl.constexpr, POW2: tl.constexpr, FIXED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    inside = (row < rows)[:, None, None] & (column < hidden)
    at = row[:, None, None] * hidden + column
    x = tl.load(x_ptr + row[:, None, None] * stride + column, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
        x = cast(x.to(tl.float32) + residual.to(tl.float32), x.dtype)
        tl.store(total_ptr + at, x, mask=inside)
    inverse_rms = inverse_rms_of(x, hidden, eps, ROWS, GROUPS)
    weight = tl.load(weight_ptr + column, mask=column < hidden, other=0.0)
    normed = times_weight(x, inverse_rms[:, None, None], weight)
    tl.store(inverse_ptr + row, inverse_rms, mask=row < rows)
    if QUANTIZE:
        WIDE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
        codes, scale_inv = encode_groups(normed.to(tl.float32), E5M2, POW2, FIXED, WIDE)
        tl.store(codes_ptr + at, codes, mask=inside)
        held = (row < rows)[:, None] & (group < tl.cdiv(hidden, GROUP))[None, :]
        where = scale_ptr + row[:, None] * scale_row + group[None, :] * scale_group
        tl.store(where, scale_inv, mask=held)
    if KEEP:
        tl.store(normed_ptr + at, normed, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    x_ptr, dy_ptr, weight_ptr, beside_ptr, dx_ptr, partial_ptr, rows, hidden, stride, dy_stride, eps,
    ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, GROUPS)[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    weight = tl.load(weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, GROUPS, GROUP), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None, None] & (column < hidden)
        x = tl.load(x_ptr + row[:, None, None] * stride + column, mask=inside, other=0.0)
        dy = tl.load(dy_ptr + row[:, None, None] * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        inverse_rms = inverse_rms_of(x, hidden, eps, ROWS, GROUPS)
        normed = x.to(tl.float32) * inverse_rms[:, None, None]
        dweight += dy * normed
        dnormed = dy * weight
        along = _sum(dnormed * normed, ROWS, GROUPS * 128) / hidden
        dx = inverse_rms[:, None, None] * (dnormed - normed * along[:, None, None])
        dx = cast(dx, dx_ptr.dtype.element_ty)
        at = row[:, None, None] * hidden + column
        if beside_ptr is not None:
            beside = tl.load(beside_ptr + at, mask=inside, other=0.0)
            dx = cast(dx.to(tl.float32) + beside.to(tl.float32), dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + at, dx, mask=inside)
    whole = tl.sum(dweight, 0)
    feature = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(partial_ptr + tl.program_id(0) * hidden + feature, whole, mask=feature < hidden)
