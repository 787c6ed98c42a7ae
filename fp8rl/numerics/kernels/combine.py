"""The weighted sum over a token's experts: `numerics.ops.combine`, without the weighted copies in memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import cast

_BLOCK = 1024


def combine(outputs: Tensor, probs: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """`numerics.ops.combine`."""
    return _Combine.apply(outputs, probs, order, dtype)


def combine_rows(outputs: Tensor, probs: Tensor, row_of: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `combine` without a gradient; row_of int64 [T * k]: where each pair's output stands."""
    (tokens, top_k), hidden = probs.shape, outputs.shape[1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=outputs.device)
    if out.numel():
        _combine_kernel[tokens, triton.cdiv(hidden, _BLOCK)](
            *(outputs, probs, row_of, out, hidden), TOP_K=top_k, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False
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
                BLOCK=_BLOCK,
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
