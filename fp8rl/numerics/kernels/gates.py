"""Computes gates (`numerics.ops.gates`). SwiGLU can also quantize its result, and has a kernel for its gradient."""

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

_ELEMENTS = 4096  # of a program
# A product fused into a sum is rounded once less, in one variant and perhaps not in another.
_EXACT: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def sigmoid_gate_forward(x: Tensor, gate: Tensor) -> Tensor:
    rows, gates_of = as_rows(x), as_rows(gate)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        wide = min(1024, triton.next_power_of_2(rows.shape[1]))
        of_program = _ELEMENTS // wide
        _sigmoid_kernel[-(-len(rows) // of_program), -(-rows.shape[1] // wide)](
            *(rows, gates_of, out, *rows.shape, rows.stride(0), gates_of.stride(0)),
            ROWS=of_program,
            COLUMNS=wide,
            **_EXACT,
        )
    return out.view(x.shape)


def token_gate_forward(x: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, inputs = as_rows(x), as_rows(hidden)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    opened = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    if out.numel():
        _token_kernel[(len(rows),)](
            *(rows, inputs, weight, out, opened, rows.shape[1], inputs.shape[1], rows.stride(0), inputs.stride(0)),
            WIDE=triton.next_power_of_2(rows.shape[1]),
            HIDDEN=triton.next_power_of_2(inputs.shape[1]),
            **_EXACT,
        )
    return out.view(x.shape), opened.view(*x.shape[:-1], 1)


def gated_rms_norm_forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, gates_of, size = as_rows(x), as_rows(gate), x.shape[-1]
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    inverse_rms = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    block = {"ROWS": max(1, _ELEMENTS // triton.next_power_of_2(size)), "SIZE": triton.next_power_of_2(size)}
    if out.numel():
        _norm_kernel[(-(-len(rows) // block["ROWS"]),)](
            *(rows, gates_of, weight, out, inverse_rms, len(rows), size, rows.stride(0), gates_of.stride(0), eps),
            **block,
            **_EXACT,
        )
    return out.view(x.shape), inverse_rms.view(*x.shape[:-1], 1)


@triton.jit(do_not_specialize=["rows"])
def _sigmoid_kernel(
    x_ptr, gate_ptr, out_ptr, rows, columns, stride, gate_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    result = x.to(tl.float32) * (1.0 / (1.0 + tl.exp(-gate)))
    tl.store(out_ptr + row * columns + column, cast(result, x.dtype), mask=inside)


@triton.jit
def _token_kernel(
    x_ptr, hidden_ptr, weight_ptr, out_ptr, open_ptr, columns, hidden, stride, hidden_stride,
    WIDE: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index, column = tl.arange(0, HIDDEN), tl.arange(0, WIDE)
    inputs = tl.load(hidden_ptr + row * hidden_stride + index, mask=index < hidden, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + index, mask=index < hidden, other=0.0).to(tl.float32)
    logit = pairwise_sum(tl.reshape(inputs * weight, (1, HIDDEN)), HIDDEN)
    gate = 1.0 / (1.0 + tl.exp(-logit))
    tl.store(open_ptr + row + tl.arange(0, 1), gate)
    x = tl.load(x_ptr + row * stride + column, mask=column < columns, other=0.0)
    result = tl.reshape(x.to(tl.float32), (1, WIDE)) * gate[:, None]
    tl.store(out_ptr + row * columns + column, cast(tl.reshape(result, (WIDE,)), x.dtype), mask=column < columns)


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, inverse_ptr, rows, size, stride, gate_stride, eps,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, SIZE)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
    gate = tl.load(gate_ptr + row[:, None] * gate_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    inverse_rms = tl.rsqrt(pairwise_sum(wide * wide, SIZE) / size + eps)
    result = wide * inverse_rms[:, None] * weight[None, :] * (gate * (1.0 / (1.0 + tl.exp(-gate))))
    tl.store(inverse_ptr + row, inverse_rms, mask=row < rows)
    tl.store(out_ptr + row[:, None] * size + column[None, :], cast(result, x.dtype), mask=inside)


# SwiGLU.

_BLOCK = {"ROWS": 8, "GROUPS": 4, "num_warps": 4, "enable_fp_fusion": False}


def swiglu_forward(gate_up: Tensor) -> Tensor:
    flat = as_rows(gate_up)
    out = torch.empty(len(flat), flat.shape[1] // 2, dtype=flat.dtype, device=flat.device)
    _swiglu(flat, out, None)
    return out.view(*gate_up.shape[:-1], out.shape[1])


def swiglu_quantize(gate_up: Tensor, spec: TensorSpec) -> QuantizedTensor:
    """Return `quantize(swiglu(gate_up), spec)` of gate_up [T, 2F] in groups of 128. No gradient."""
    out = empty_rows((gate_up.shape[0], gate_up.shape[1] // 2), spec, gate_up.device)
    _swiglu(as_rows(gate_up), out.data, out)
    return out


def swiglu_backward(gate_up: Tensor, dy: Tensor) -> Tensor:
    features = dy.shape[-1]
    flat, dy = as_rows(gate_up), as_rows(dy)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    if out.numel():
        _swiglu_backward_kernel[_swiglu_grid(len(flat), features)](
            flat, dy, out, len(flat), features, flat.stride(0), dy.stride(0), **_BLOCK
        )
    return out.view(gate_up.shape)


def _swiglu(gate_up: Tensor, out: Tensor, quantized: QuantizedTensor | None) -> None:
    tokens, features = out.shape
    if out.numel():
        _swiglu_kernel[_swiglu_grid(tokens, features)](
            *(gate_up, out, quantized.scale_inv if quantized else out, tokens, features, gate_up.stride(0)),
            *(quantized.scale_inv.stride() if quantized else (0, 0)),
            QUANTIZE=quantized is not None,
            **format_constants(quantized.spec if quantized else None),
            **_BLOCK,
        )


def _swiglu_grid(tokens: int, features: int) -> tuple[int, int]:
    return -(-tokens // _BLOCK["ROWS"]), -(-features // (_BLOCK["GROUPS"] * GROUP.value))


@triton.jit(do_not_specialize=["tokens", "scale_group"])
def _swiglu_kernel(
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
    result = swiglu_of(gate, up)
    at = row[:, :, None] * features + column
    if QUANTIZE:
        WIDE: tl.constexpr = gate_up_ptr.dtype.element_ty == tl.float32
        codes, scale_inv = encode_groups(result.to(tl.float32), E5M2, POW2, FIXED, WIDE)
        tl.store(out_ptr + at, codes, mask=inside)
        where = scale_ptr + row * scale_row + group * scale_group
        tl.store(where, scale_inv, mask=(row < tokens) & (group < tl.cdiv(features, GROUP)))
    else:
        tl.store(out_ptr + at, result, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _swiglu_backward_kernel(
    gate_up_ptr, dy_ptr, out_ptr, tokens, features, stride, dy_stride, ROWS: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * GROUPS * GROUP + tl.arange(0, GROUPS * GROUP))[None, :]
    inside = (row < tokens) & (column < features)
    start = gate_up_ptr + row * stride + column
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + features, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    dgate, dup = swiglu_gradient(gate, dy * up, True), swiglu_gradient(gate, dy * gate, False)
    at = out_ptr + row * (2 * features) + column
    tl.store(at, cast(dgate, out_ptr.dtype.element_ty), mask=inside)
    tl.store(at + features, cast(dup, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_of(gate, up):
    """SwiGLU, rounded to the dtype of gate."""
    wide = gate.to(tl.float32)
    return cast(wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32), gate.dtype)


@triton.jit
def swiglu_gradient(gate, product, of_gate):
    """The gradient of gate if `of_gate`, and then product is dy * up; else the gradient of up, from dy * gate. FP32."""
    gate = gate.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    return tl.where(of_gate, product * sigmoid * (1.0 + gate * (1.0 - sigmoid)), product * sigmoid)
