"""SwiGLU: `numerics.ops.swiglu`, alone and quantized on the way out."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import GROUP, absolute, as_rows, cast, encode, inverse, scale_from_amax
from fp8rl.numerics.kernels.quantize import empty_rows, format_constants
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec

_BLOCK = {"ROWS": 8, "GROUPS": 4, "num_warps": 4, "enable_fp_fusion": False}


def swiglu(gate_up: Tensor) -> Tensor:
    """`numerics.ops.swiglu`."""
    return _SwiGlu.apply(gate_up)


def swiglu_quantize(gate_up: Tensor, spec: TensorSpec) -> QuantizedTensor:
    """Return `quantize(swiglu(gate_up), spec)` of gate_up [T, 2F] in groups of 128. No gradient."""
    out = empty_rows((gate_up.shape[0], gate_up.shape[1] // 2), spec, gate_up.device)
    _forward(as_rows(gate_up), out.data, out)
    return out


def swiglu_backward(gate_up: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of gate_up [..., 2F] from that of the result, dy [..., F]."""
    features = dy.shape[-1]
    flat, dy = as_rows(gate_up), as_rows(dy)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    if out.numel():
        _backward_kernel[_grid(len(flat), features)](
            flat, dy, out, len(flat), features, flat.stride(0), dy.stride(0), **_BLOCK
        )
    return out.view(gate_up.shape)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        flat = as_rows(gate_up)
        out = torch.empty(len(flat), flat.shape[1] // 2, dtype=flat.dtype, device=flat.device)
        _forward(flat, out, None)
        return out.view(*gate_up.shape[:-1], out.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return swiglu_backward(ctx.saved_tensors[0], grads[0])


def _forward(gate_up: Tensor, out: Tensor, quantized: QuantizedTensor | None) -> None:
    tokens, features = out.shape
    if out.numel():
        _forward_kernel[_grid(tokens, features)](
            *(gate_up, out, quantized.scale_inv if quantized else out, tokens, features, gate_up.stride(0)),
            *(quantized.scale_inv.stride() if quantized else (0, 0)),
            QUANTIZE=quantized is not None,
            **format_constants(quantized.spec if quantized else None),
            **_BLOCK,
        )


def _grid(tokens: int, features: int) -> tuple[int, int]:
    return triton.cdiv(tokens, _BLOCK["ROWS"]), triton.cdiv(features, _BLOCK["GROUPS"] * GROUP.value)


@triton.jit(do_not_specialize=["tokens", "scale_group"])
def _forward_kernel(
    gate_up_ptr, out_ptr, scale_ptr, tokens, features, stride, scale_row, scale_group,
    QUANTIZE: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr, FIXED: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[None, :]
    column = group[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    inside = (row < tokens)[:, :, None] & (column < features)
    start = gate_up_ptr + row[:, :, None] * stride + column
    gate = tl.load(start, mask=inside, other=0.0)
    up = tl.load(start + features, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    result = cast(wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32), gate.dtype)
    at = row[:, :, None] * features + column
    if QUANTIZE:
        rounded = result.to(tl.float32)
        WIDE: tl.constexpr = gate_up_ptr.dtype.element_ty == tl.float32
        scale = scale_from_amax(tl.max(absolute(rounded), 2), E5M2, POW2, FIXED, WIDE)
        tl.store(out_ptr + at, encode(rounded * scale[:, :, None], E5M2), mask=inside)
        where = scale_ptr + row * scale_row + group * scale_group
        tl.store(where, inverse(scale, POW2), mask=(row < tokens) & (group < tl.cdiv(features, GROUP)))
    else:
        tl.store(out_ptr + at, result, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    gate_up_ptr, dy_ptr, out_ptr, tokens, features, stride, dy_stride, ROWS: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * GROUPS * GROUP + tl.arange(0, GROUPS * GROUP))[None, :]
    inside = (row < tokens) & (column < features)
    start = gate_up_ptr + row * stride + column
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + features, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    at = out_ptr + row * (2 * features) + column
    tl.store(at, cast(dgate, out_ptr.dtype.element_ty), mask=inside)
    tl.store(at + features, cast(dy * gate * sigmoid, out_ptr.dtype.element_ty), mask=inside)


# The weighted sum over a token's experts: `numerics.ops.combine`.

_COMBINE_BLOCK = 1024


def combine(outputs: Tensor, probs: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """`numerics.ops.combine`, without the weighted copies in memory."""
    return _Combine.apply(outputs, probs, order, dtype)


def combine_rows(outputs: Tensor, probs: Tensor, row_of: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `combine` without a gradient; row_of int64 [T * k]: where each pair's output stands."""
    (tokens, top_k), hidden = probs.shape, outputs.shape[1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=outputs.device)
    if out.numel():
        _combine_kernel[tokens, triton.cdiv(hidden, _COMBINE_BLOCK)](
            *(outputs, probs, row_of, out, hidden),
            TOP_K=top_k,
            BLOCK=_COMBINE_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, probs: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
        outputs, probs = outputs.contiguous(), probs.contiguous()
        row_of = torch.empty_like(order)
        row_of[order] = torch.arange(order.numel(), device=order.device, dtype=order.dtype)
        ctx.save_for_backward(outputs, probs, row_of)
        return combine_rows(outputs, probs, row_of, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        outputs, probs, row_of = ctx.saved_tensors
        tokens, top_k = probs.shape
        doutputs, dprobs = torch.empty_like(outputs), torch.empty_like(probs)
        if doutputs.numel():
            _combine_backward_kernel[tokens, top_k](
                *(grads[0].contiguous(), outputs, probs, row_of, doutputs, dprobs, outputs.shape[1], top_k),
                BLOCK=_COMBINE_BLOCK,
                num_warps=4,
            )
        return doutputs, dprobs, None, None


@triton.jit
def _combine_kernel(outputs_ptr, probs_ptr, row_ptr, out_ptr, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        values = tl.load(outputs_ptr + tl.load(row_ptr + pair) * hidden + column, mask=column < hidden, other=0.0)
        total += values.to(tl.float32) * tl.load(probs_ptr + pair)
    tl.store(out_ptr + token * hidden + column, cast(total, out_ptr.dtype.element_ty), mask=column < hidden)


@triton.jit
def _combine_backward_kernel(
    dout_ptr, outputs_ptr, probs_ptr, row_ptr, doutputs_ptr, dprobs_ptr, hidden, top_k, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = token * top_k + tl.program_id(1)
    row, prob = tl.load(row_ptr + pair), tl.load(probs_ptr + pair)
    along = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        dout = tl.load(dout_ptr + token * hidden + column, mask=column < hidden, other=0.0).to(tl.float32)
        values = tl.load(outputs_ptr + row * hidden + column, mask=column < hidden, other=0.0).to(tl.float32)
        along += dout * values
        share = cast(dout * prob, doutputs_ptr.dtype.element_ty)
        tl.store(doutputs_ptr + row * hidden + column, share, mask=column < hidden)
    tl.store(dprobs_ptr + pair, tl.sum(along, 0))
