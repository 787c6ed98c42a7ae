"""The low-rank terms of adapters: `numerics.ops.low_rank`. A program makes a tile of the term.

Each part of a fused product has a dot product of its own over its r, filled up to whole instructions with zeros; for
the rows of another part it adds zeros. So a row's bits do not depend on what it is fused with.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import cast, dot
from fp8rl.numerics.kernels.products.grouped import grouped_gemm, grouped_wgrad_matmul
from fp8rl.numerics.kernels.products.tiles import TALL, Tiles, make_tiles
from fp8rl.numerics.ops.linear import wide_mm

_WIDTH = 128
_FEWEST_RANK = 16  # that an instruction multiplies


def low_rank_term(h: Tensor, b: Tensor, scale: float, parts: int = 1) -> Tensor:
    """`numerics.ops.low_rank_term`."""
    return _Term.apply(h, b, scale, parts, None)


def grouped_low_rank_term(h: Tensor, counts: Tensor, b: Tensor, scale: float, parts: int = 1) -> Tensor:
    """`numerics.ops.grouped_low_rank_term`, without a wait for the host."""
    return _Term.apply(h, b, scale, parts, make_tiles(counts.to(h.device), len(h)))


class _Term(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, b: Tensor, scale: float, parts: int, tiles: Tiles | None) -> Tensor:
        ctx.save_for_backward(h, b)
        ctx.scale, ctx.tiles = scale, tiles
        rows = h.reshape(-1, h.shape[-1]).contiguous()
        return _term(rows, b.contiguous(), scale, parts, tiles).view(*h.shape[:-1], b.shape[-2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        h, b = ctx.saved_tensors
        rows, dy = h.reshape(-1, h.shape[-1]), grads[0].reshape(-1, b.shape[-2]).contiguous()
        if ctx.tiles is None:
            dh, db = wide_mm(dy, b), wide_mm(dy.t(), rows)
        else:
            dh = grouped_gemm(dy, b.transpose(1, 2).contiguous(), ctx.tiles, dy.dtype)
            db = grouped_wgrad_matmul(dy, rows, ctx.tiles, b.dtype)
        return (dh * ctx.scale).view(h.shape), db * ctx.scale, None, None, None


def _term(h: Tensor, b: Tensor, scale: float, parts: int, tiles: Tiles | None) -> Tensor:
    """h [T, parts * r], b [N, parts * r] or [groups, N, parts * r] -> [T, N]"""
    rows, n, rank = len(h), b.shape[-2], b.shape[-1] // parts
    out = torch.empty(rows, n, dtype=h.dtype, device=h.device)
    if not out.numel():
        return out
    row_tiles = tiles.expert.numel() if tiles else triton.cdiv(rows, TALL)
    _term_kernel[row_tiles, triton.cdiv(n, _WIDTH)](
        *(h, b, out),
        *((tiles.expert, tiles.first, tiles.rows) if tiles else (None,) * 3),
        *(rows, n, scale),
        PARTS=parts,
        RANK=rank,
        ROOM=max(_FEWEST_RANK, triton.next_power_of_2(rank)),
        HEIGHT=TALL,
        WIDTH=_WIDTH,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(do_not_specialize=["m", "scale", "first_ptr", "rows_ptr"])
def _term_kernel(
    h_ptr, b_ptr, out_ptr, expert_ptr, first_ptr, rows_ptr, m, n, scale,
    PARTS: tl.constexpr, RANK: tl.constexpr, ROOM: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = expert_ptr is not None
    tile = tl.program_id(0)
    first = tl.load(first_ptr + tile) if TILES else tile * HEIGHT
    rows = tl.load(rows_ptr + tile) if TILES else tl.minimum(m - first, HEIGHT)
    matrix = tl.load(expert_ptr + tile).to(tl.int64) * n if TILES else 0
    lane, inner = tl.arange(0, HEIGHT), tl.arange(0, ROOM)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    row = (first + lane).to(tl.int64)[:, None]
    exists, inside, counts = (lane < rows)[:, None], columns < n, (inner < RANK)[None, :]
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for part in tl.static_range(PARTS):
        at = part * RANK + inner[None, :]
        h = tl.load(h_ptr + row * (PARTS * RANK) + at, mask=exists & counts, other=0.0)
        b = tl.load(b_ptr + (matrix + columns)[:, None] * (PARTS * RANK) + at, mask=inside[:, None] & counts, other=0.0)
        total = dot(h, b.T, total)
    tl.store(
        out_ptr + row * n + columns[None, :],
        cast(total * scale, out_ptr.dtype.element_ty),
        mask=exists & inside[None, :],
    )
