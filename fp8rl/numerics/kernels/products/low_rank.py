"""Computes the low-rank terms of adapters (`numerics.ops.low_rank`). A program computes one tile of the term.

Each part of a fused product has its own dot product over its rank r, padded with zeros to whole instructions. It adds
zeros to the rows of other parts. So a row's bits do not depend on what the row is fused with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import cast, dot
from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.grouped import grouped_wgrad_matmul
from fp8rl.numerics.kernels.products.tiles import TALL, Tiles
from fp8rl.numerics.ops.linear import wide_mm

_WIDTH = 128


def low_rank_gradients(dy: Tensor, h: Tensor, b: Tensor, spans: Tiles | None) -> tuple[Tensor, Tensor]:
    if spans is None:
        return wide_mm(dy, b), wide_mm(dy.t(), h)
    dy = dy.contiguous()
    dh = gemm(dy, b.transpose(1, 2).contiguous(), dy.dtype, tiles=spans)
    return dh, grouped_wgrad_matmul(dy, h, spans, b.dtype)


def low_rank_product(h: Tensor, b: Tensor, scale: float, parts: int, spans: Tiles | None) -> Tensor:
    h, b = h.contiguous(), b.contiguous()
    rows, n, rank = len(h), b.shape[-2], b.shape[-1] // parts
    out = torch.empty(rows, n, dtype=h.dtype, device=h.device)
    if not out.numel():
        return out
    row_tiles = spans.expert.numel() if spans else -(-rows // TALL)
    _term_kernel[row_tiles, -(-n // _WIDTH)](
        *(h, b, out),
        *((spans.expert, spans.first, spans.rows) if spans else (None,) * 3),
        *(rows, n, scale),
        PARTS=parts,
        RANK=rank,
        ROOM=max(16, triton.next_power_of_2(rank)),  # an instruction multiplies no fewer
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
