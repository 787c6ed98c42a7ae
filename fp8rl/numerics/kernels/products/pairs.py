"""Sorts the rows of tokens by expert, with the tiles of the grouped products, in one kernel. Computes the weighted sum
over a token's experts (`numerics.ops.combine`) without weighted copies in memory.

Choices are numbered token by token, and an expert's rows are in the order of these numbers, as
`numerics.ops.experts.group_by_expert` sorts them. Each program counts all choices, and the choices before its own. So
it knows where its rows go, and waits for no other program. Numbers are copied, not computed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import GROUP, cast
from fp8rl.numerics.kernels.products.tiles import Tiles, describe_tiles, room_for_tiles
from fp8rl.numerics.kernels.quantize import empty_rows
from fp8rl.numerics.quantize import QuantizedTensor

_FEW, _MANY = 16, 64  # choices of a program: few fill a GPU where there are few in all, many are counted less often
_MANY_FROM = 8192
_COUNTED = 1024  # choices that are counted at a time
_WIDTH = 512  # columns that are copied at a time
_COLUMNS = 1024  # that are added up at a time


def gather_by_expert(
    rows: QuantizedTensor, chosen: Tensor, experts: int, height: int
) -> tuple[QuantizedTensor, Tensor, Tensor, Tiles]:
    """Return the rows of all choices sorted by expert [T * k, K], each choice's row int64 [T, k], each row's token
    int64 [T * k], and the rows' tiles.

    rows [T, K] in groups along K; chosen int [T, k], ids from 0 to experts - 1.
    """
    (tokens, top_k), k, device = chosen.shape, rows.data.shape[1], rows.data.device
    pairs, chosen = tokens * top_k, chosen.contiguous()
    tiles = room_for_tiles(experts, pairs, height, device)
    out = empty_rows((pairs, k), rows.spec, device)
    row_of, token_of = torch.empty(2, pairs, dtype=torch.int64, device=device)
    own = _MANY if pairs >= _MANY_FROM else _FEW
    _gather_kernel[-(-pairs // own),](
        *(chosen, rows.data.view(torch.uint8), rows.scale_inv, out.data.view(torch.uint8), out.scale_inv, row_of),
        *(token_of, tiles.expert, tiles.first, tiles.rows, tiles.starts, pairs, experts, tiles.expert.numel(), k),
        *(*rows.scale_inv.stride(), *out.scale_inv.stride()),
        TOP_K=top_k,
        EXPERTS=triton.next_power_of_2(experts),
        SIZE=height,
        PAIRS=own,
        COUNTED=_COUNTED,
        WIDTH=_WIDTH,
        num_warps=4,
    )
    return out, row_of.view(chosen.shape), token_of, tiles


@triton.jit(do_not_specialize=["pairs", "most", "first_ptr", "rows_ptr", "scale_group", "out_scale_group"])
def _gather_kernel(
    chosen_ptr, codes_ptr, scale_ptr, out_ptr, out_scale_ptr, row_ptr, token_ptr, expert_ptr, first_ptr, rows_ptr,
    starts_ptr, pairs, experts, most, k, scale_row, scale_group, out_scale_row, out_scale_group,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr, COUNTED: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    first, lane, each = tl.program_id(0) * PAIRS, tl.arange(0, PAIRS), tl.arange(0, EXPERTS)
    counts, before = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, pairs, COUNTED):
        pair = start + tl.arange(0, COUNTED)
        expert = tl.load(chosen_ptr + pair, mask=pair < pairs, other=0).to(tl.int32)
        counts += tl.histogram(expert, EXPERTS, mask=pair < pairs)
        if start < first:
            before += tl.histogram(expert, EXPERTS, mask=pair < first)
    # As many tiles as choices at most, so each program describes as many as it has choices.
    describe_tiles(counts, expert_ptr, first_ptr, rows_ptr, starts_ptr, experts, most, EXPERTS, SIZE, PAIRS)

    pair = first + lane
    exists = pair < pairs
    own = tl.load(chosen_ptr + pair, mask=exists, other=0).to(tl.int32)
    among = tl.sum(((own[None, :] == own[:, None]) & (lane[None, :] < lane[:, None])).to(tl.int32), 1)
    begin = tl.cumsum(counts, 0) - counts + before
    row = tl.sum(tl.where(own[:, None] == each[None, :], begin[None, :], 0), 1) + among
    tl.store(row_ptr + pair, row.to(tl.int64), mask=exists)

    tl.store(token_ptr + row, (pair // TOP_K).to(tl.int64), mask=exists)

    token, row = (pair // TOP_K).to(tl.int64)[:, None], row.to(tl.int64)[:, None]
    for start in range(0, k, WIDTH):
        column = start + tl.arange(0, WIDTH)[None, :]
        inside = exists[:, None] & (column < k)
        tl.store(out_ptr + row * k + column, tl.load(codes_ptr + token * k + column, mask=inside), mask=inside)
    groups = tl.cdiv(k, GROUP)
    for start in range(0, groups, 16):
        group = start + tl.arange(0, 16)[None, :]
        inside = exists[:, None] & (group < groups)
        scales = tl.load(scale_ptr + token * scale_row + group * scale_group, mask=inside)
        tl.store(out_scale_ptr + row * out_scale_row + group * out_scale_group, scales, mask=inside)


def combine(outputs: Tensor, probs: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    row_of = torch.empty_like(order)
    row_of[order] = torch.arange(order.numel(), device=order.device, dtype=order.dtype)
    return Combine.apply(outputs.contiguous(), probs.contiguous(), row_of.view(probs.shape), dtype)


def combine_rows(outputs: Tensor, probs: Tensor | None, row_of: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `Combine` without a gradient. probs: None if all are 1."""
    (tokens, top_k), hidden = row_of.shape, outputs.shape[1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=outputs.device)
    if out.numel():
        _combine_kernel[tokens, -(-hidden // _COLUMNS)](
            *(outputs, probs, row_of, out, hidden), TOP_K=top_k, BLOCK=_COLUMNS, num_warps=4, enable_fp_fusion=False
        )
    return out


class Combine(torch.autograd.Function):
    """Computes `combine`. row_of int64 [T, k]: the row that holds the output of each pair."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, probs: Tensor, row_of: Tensor, dtype: torch.dtype) -> Tensor:
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
                BLOCK=_COLUMNS,
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
        total += values.to(tl.float32) * (1.0 if probs_ptr is None else tl.load(probs_ptr + pair))
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
