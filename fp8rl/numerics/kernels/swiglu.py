"""SwiGLU: `numerics.ops.swiglu`, alone and quantized on the way out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import GROUP, absolute, as_rows, cast, encode, inverse, scale_from_amax
from fp8rl.numerics.kernels.quantize import empty_rows, format_constants
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec

_BLOCK = {"ROWS": 8, "GROUPS": 4, "num_warps": 4, "enable_fp_fusion": False}


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """`numerics.ops.swiglu.swiglu_forward`."""
    flat = as_rows(gate_up)
    out = torch.empty(len(flat), flat.shape[1] // 2, dtype=flat.dtype, device=flat.device)
    _forward(flat, out, None)
    return out.view(*gate_up.shape[:-1], out.shape[1])


def swiglu_quantize(gate_up: Tensor, spec: TensorSpec) -> QuantizedTensor:
    """Return `quantize(swiglu(gate_up), spec)` of gate_up [T, 2F] in groups of 128. No gradient."""
    out = empty_rows((gate_up.shape[0], gate_up.shape[1] // 2), spec, gate_up.device)
    _forward(as_rows(gate_up), out.data, out)
    return out


def swiglu_backward(gate_up: Tensor, dy: Tensor) -> Tensor:
    """`numerics.ops.swiglu.swiglu_backward`."""
    features = dy.shape[-1]
    flat, dy = as_rows(gate_up), as_rows(dy)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    if out.numel():
        _backward_kernel[_grid(len(flat), features)](
            flat, dy, out, len(flat), features, flat.stride(0), dy.stride(0), **_BLOCK
        )
    return out.view(gate_up.shape)


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
