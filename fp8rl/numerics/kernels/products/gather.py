"""The rows of tokens laid out for their experts, in one kernel: sorted, with the tiles of the grouped products.

A token's choices are numbered one after the other, and an expert's rows are in the order of these numbers, as
`numerics.ops.experts.group_by_expert` sorts them. Each program counts all choices and those before its own, and so
knows where its own rows go: there is nothing that programs would have to wait for. Numbers are copied, not computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import GROUP
from fp8rl.numerics.kernels.products.tiles import Tiles, describe_tiles, room_for_tiles
from fp8rl.numerics.kernels.quantize import empty_rows
from fp8rl.numerics.quantize import QuantizedTensor

_FEW, _MANY = 16, 64  # choices of a program: few fill a GPU where there are few in all, many are counted less often
_MANY_FROM = 8192
_COUNTED = 1024  # choices that are counted at a time
_WIDTH = 512  # columns that are copied at a time


def gather_by_expert(
    rows: QuantizedTensor, chosen: Tensor, experts: int, height: int
) -> tuple[QuantizedTensor, Tensor, Tiles]:
    """Return the rows of all choices sorted by expert [T * k, K], each choice's row int64 [T * k], and their tiles.

    rows [T, K] in groups along K; chosen int [T, k], ids from 0 to experts - 1.
    """
    (tokens, top_k), k, device = chosen.shape, rows.data.shape[1], rows.data.device
    pairs, chosen = tokens * top_k, chosen.contiguous()
    tiles = room_for_tiles(experts, pairs, height, device)
    out, row_of = empty_rows((pairs, k), rows.spec, device), torch.empty(pairs, dtype=torch.int64, device=device)
    own = _MANY if pairs >= _MANY_FROM else _FEW
    _gather_kernel[triton.cdiv(pairs, own),](
        *(chosen, rows.data.view(torch.uint8), rows.scale_inv, out.data.view(torch.uint8), out.scale_inv, row_of),
        *(tiles.expert, tiles.first, tiles.rows, tiles.starts, pairs, experts, tiles.expert.numel(), k),
        *(*rows.scale_inv.stride(), *out.scale_inv.stride()),
        TOP_K=top_k,
        EXPERTS=triton.next_power_of_2(experts),
        SIZE=height,
        PAIRS=own,
        COUNTED=_COUNTED,
        WIDTH=_WIDTH,
        num_warps=4,
    )
    return out, row_of, tiles


@triton.jit(do_not_specialize=["pairs", "most", "first_ptr", "rows_ptr", "scale_group", "out_scale_group"])
def _gather_kernel(
    chosen_ptr, codes_ptr, scale_ptr, out_ptr, out_scale_ptr, row_ptr, expert_ptr, first_ptr, rows_ptr, starts_ptr,
    pairs, experts, most, k, scale_row, scale_group, out_scale_row, out_scale_group,
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
