"""Computes the gradients of experts' matrices from rows that are sorted by expert.

Nothing here waits for the counts on the host.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.kernels.arithmetic import cast, dot
from fp8rl.numerics.kernels.products.gemm import check_operands, describe, scales, sum_products
from fp8rl.numerics.kernels.products.tiles import TALL, Tiles
from fp8rl.numerics.quantize import QuantizedTensor

_TOKENS = 64  # that one step of an unquantized gradient sums


def grouped_wgrad(
    dy_t: QuantizedTensor, x_t: QuantizedTensor, tiles: Tiles, dtype: torch.dtype, total: Tensor | None = None
) -> Tensor:
    """Return dy^T x summed over each expert's tokens, [E, N, K] in `dtype`; zeros for an expert without tokens.

    total: FP32 [E, N, K], contiguous. The result, rounded to `dtype`, is added to `total`, which is returned.
    dy_t [N, 128 tiles], x_t [K, 128 tiles]: as `backward_operands` gives them with these tiles, tile i's tokens in the
    columns from 128 i on, and zeros where a tile has no token. Each expert gets the bits of `gemm` over its columns.
    """
    left, right = check_operands(dy_t, x_t)
    n, k = left.shape[0], right.shape[0]
    columns = tiles.expert.numel() * TALL
    if left.shape[1] != columns or right.shape[1] != columns:
        expected = f"{columns}, of {columns // TALL} tiles"
        remedy = "Quantize both along the tokens with the same tiles."
        raise user_error("grouped_wgrad", f"{left.shape[1]} and {right.shape[1]} columns", expected, remedy)
    out = _room(tiles, n, k, dtype, left.device, columns) if total is None else total
    if out.numel() and columns:
        _wgrad_kernel[-(-k // TALL), -(-n // TALL), len(out)](
            *(describe(left, TALL, TALL), describe(right, TALL, TALL), out, tiles.starts, n, k),
            *scales(dy_t, x_t, TALL),
            **_constants(dtype, total),
            SIZE=TALL,
            num_warps=8,
            num_stages=4,
        )
    return out


def grouped_wgrad_matmul(
    dy: Tensor, x: Tensor, tiles: Tiles, dtype: torch.dtype, total: Tensor | None = None
) -> Tensor:
    """`grouped_wgrad` of unquantized BF16 rows dy [T, N] and x [T, K]."""
    check_operands(dy, x)
    if dy.dtype != torch.bfloat16 or len(dy) != len(x):
        expected = "bfloat16, and as many rows in x as in dy"
        remedy = "Pass the gradient and the input of the same rows."
        raise user_error("grouped_wgrad_matmul", f"{dy.dtype}, {len(dy)} and {len(x)} rows", expected, remedy)
    dy, x = dy.contiguous(), x.contiguous()
    n, k = dy.shape[1], x.shape[1]
    out = _room(tiles, n, k, dtype, x.device, len(x)) if total is None else total
    if out.numel() and len(x):
        _wgrad_matmul_kernel[-(-k // TALL), -(-n // TALL), len(out)](
            *(dy, x, out, tiles.starts, tiles.first, tiles.rows, n, k),
            **_constants(dtype, total),
            SIZE=TALL,
            TOKENS=_TOKENS,
            num_warps=8,
            num_stages=4,
        )
    return out


def _room(tiles: Tiles, n: int, k: int, dtype: torch.dtype, device: torch.device, tokens: int) -> Tensor:
    """Allocate [E, N, K], as zeros if there are no tokens, because then no kernel writes to it."""
    return (torch.empty if tokens else torch.zeros)(tiles.starts.numel() - 1, n, k, dtype=dtype, device=device)


def _constants(dtype: torch.dtype, total: Tensor | None) -> dict[str, Any]:
    return {"DTYPE": tl.float32 if dtype == torch.float32 else tl.bfloat16, "ADD": total is not None}


@triton.jit
def _wgrad_kernel(
    dy_desc, x_desc, out_ptr, starts_ptr, n, k, a_scale_ptr, b_scale_ptr, a_row, a_step, b_matrix, b_row, b_step,
    DTYPE: tl.constexpr, ADD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2).to(tl.int64)
    row, column = tl.program_id(1) * SIZE, tl.program_id(0) * SIZE
    rows, columns = row + tl.arange(0, SIZE), column + tl.arange(0, SIZE)
    begin, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    acc = sum_products(
        dy_desc, x_desc, row, column, begin, end, 1,
        a_scale_ptr + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * a_row, b_scale_ptr + column, a_step, b_step,
        "token_group", False, SIZE, SIZE, SIZE,
    )  # fmt: skip
    _put(out_ptr, expert, begin < end, rows, columns, n, k, acc, DTYPE, ADD)


@triton.jit
def _wgrad_matmul_kernel(
    dy_ptr, x_ptr, out_ptr, starts_ptr, first_ptr, rows_ptr, n, k,
    DTYPE: tl.constexpr, ADD: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2).to(tl.int64)
    begin, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    first, last = 0, 0
    if begin < end:
        first = tl.load(first_ptr + begin)
        last = tl.load(first_ptr + end - 1) + tl.load(rows_ptr + end - 1)
    rows = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    columns = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    acc = tl.zeros((SIZE, SIZE), tl.float32)
    for token in range(first, last, TOKENS):
        tokens = (token + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
        dy = tl.load(dy_ptr + tokens * n + rows[None, :], mask=(tokens < last) & (rows < n)[None, :], other=0.0)
        x = tl.load(x_ptr + tokens * k + columns[None, :], mask=(tokens < last) & (columns < k)[None, :], other=0.0)
        acc = dot(dy.T, x, acc)
    _put(out_ptr, expert, begin < end, rows, columns, n, k, acc, DTYPE, ADD)


@triton.jit
def _put(out_ptr, expert, has_tokens, rows, columns, n, k, acc, DTYPE: tl.constexpr, ADD: tl.constexpr):
    """Round a tile of an expert's matrix [N, K], and store it or, if the expert has tokens, add it to what is there."""
    where = out_ptr + (expert * n + rows)[:, None] * k + columns[None, :]
    inside = (rows < n)[:, None] & (columns < k)[None, :]
    rounded = cast(acc, DTYPE)
    if ADD:
        inside &= has_tokens
        rounded = tl.load(where, mask=inside, other=0.0) + rounded.to(tl.float32)
    tl.store(where, rounded, mask=inside)
