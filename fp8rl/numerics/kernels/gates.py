"""Gates: `numerics.ops.gates`. Gradients are those of the definitions, in torch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import as_rows, cast, pairwise_sum
from fp8rl.numerics.ops import gates

_ELEMENTS = 4096  # of a program
# A product fused into a sum is rounded once less, in one variant and perhaps not in another.
_EXACT: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`numerics.ops.sigmoid_gate`."""
    return _SigmoidGate.apply(x, gate)


def token_gate(x: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """`numerics.ops.token_gate`."""
    return _TokenGate.apply(x, hidden, weight)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`numerics.ops.gated_rms_norm`."""
    return _GatedRmsNorm.apply(x, gate, weight, eps)


class _SigmoidGate(gates.SigmoidGate):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        rows, gates_of = as_rows(x), as_rows(gate)
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        if out.numel():
            block = _rows_and_columns(rows.shape[1])
            _sigmoid_kernel[_grid(out.shape[0], out.shape[1], block)](
                *(rows, gates_of, out, *rows.shape, rows.stride(0), gates_of.stride(0)), **block, **_EXACT
            )
        return out.view(x.shape)


class _TokenGate(gates.TokenGate):
    @staticmethod
    def forward(ctx: Any, x: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
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
        ctx.save_for_backward(x, hidden, weight, opened.view(*x.shape[:-1], 1))
        return out.view(x.shape)


class _GatedRmsNorm(gates.GatedRmsNorm):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, gates_of, size = as_rows(x), as_rows(gate), x.shape[-1]
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        inverse_rms = torch.empty(len(rows), dtype=torch.float32, device=x.device)
        block = {"ROWS": max(1, _ELEMENTS // triton.next_power_of_2(size)), "SIZE": triton.next_power_of_2(size)}
        if out.numel():
            _norm_kernel[(triton.cdiv(len(rows), block["ROWS"]),)](
                *(rows, gates_of, weight, out, inverse_rms, len(rows), size, rows.stride(0), gates_of.stride(0), eps),
                **block,
                **_EXACT,
            )
        ctx.save_for_backward(x, gate, weight, inverse_rms.view(*x.shape[:-1], 1))
        return out.view(x.shape)


def _rows_and_columns(columns: int) -> dict[str, int]:
    wide = min(1024, triton.next_power_of_2(columns))
    return {"ROWS": _ELEMENTS // wide, "COLUMNS": wide}


def _grid(rows: int, columns: int, block: dict[str, int]) -> tuple[int, int]:
    return triton.cdiv(rows, block["ROWS"]), triton.cdiv(columns, block["COLUMNS"])


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
