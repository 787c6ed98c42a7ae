"""Products of rows sorted by expert, each with its expert's matrix, and the gradients of these matrices.

Rows go through the kernel of `gemm`, tile by tile (`make_tiles`): every row has the bits that `gemm` gives it alone.
Nothing here waits for the counts on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from numerics.errors import user_error
from numerics.kernels.arithmetic import cast, dot
from numerics.kernels.gemm import check_operands, describe, product, scales, sum_products
from numerics.kernels.heights import TALL
from numerics.kernels.tiles import Tiles
from numerics.quantize import QuantizedTensor

_TOKENS = 64  # that one step of an unquantized gradient sums


def grouped_gemm(a: QuantizedTensor, b: QuantizedTensor, tiles: Tiles, dtype: torch.dtype) -> torch.Tensor:
    """a [T, K] @ b[e] [N, K]^T of each row's expert e -> [T, N] in `dtype`. b [E, N, K], in blocks of 128 x 128.

    Rows that belong to no tile are not written.
    """
    return product(a, b, dtype, tiles=tiles)


def grouped_matmul(a: torch.Tensor, b: torch.Tensor, tiles: Tiles, dtype: torch.dtype) -> torch.Tensor:
    """`grouped_gemm` of unquantized rows a [T, K] and matrices b [E, N, K]: the bits of `matmul`."""
    return product(a, b, dtype, tiles=tiles)


def grouped_wgrad(dy_t: QuantizedTensor, x_t: QuantizedTensor, tiles: Tiles, dtype: torch.dtype) -> torch.Tensor:
    """The sum over each expert's tokens of dy^T x -> [E, N, K] in `dtype`; zeros for an expert without tokens.

    dy_t [N, 128 tiles], x_t [K, 128 tiles]: as `quantize_columns` gives them with these tiles, tile i's tokens in the
    columns from 128 i on, and zeros where a tile has no token. Each expert gets the bits of `gemm` over its columns.
    """
    left, right = check_operands(dy_t, x_t)
    n, k = left.shape[0], right.shape[0]
    columns = tiles.expert.numel() * TALL
    if left.shape[1] != columns or right.shape[1] != columns:
        raise user_error(
            "grouped_wgrad",
            found=f"{left.shape[1]} and {right.shape[1]} columns",
            expected=f"{columns}, of {columns // TALL} tiles",
            remedy="Quantize both along the tokens with the same tiles.",
        )
    out = torch.empty(tiles.starts.numel() - 1, n, k, dtype=dtype, device=left.device)
    if not columns:
        return out.zero_()
    if out.numel():
        _wgrad_kernel[triton.cdiv(k, TALL), triton.cdiv(n, TALL), len(out)](
            *(describe(left, TALL, TALL), describe(right, TALL, TALL), out, tiles.starts, n, k),
            *scales(dy_t, x_t, TALL),
            SIZE=TALL,
            num_warps=8,
            num_stages=4,
        )
    return out


def grouped_wgrad_matmul(dy: torch.Tensor, x: torch.Tensor, tiles: Tiles, dtype: torch.dtype) -> torch.Tensor:
    """`grouped_wgrad` of unquantized BF16 rows dy [T, N] and x [T, K]."""
    check_operands(dy, x)
    if dy.dtype != torch.bfloat16 or len(dy) != len(x):
        raise user_error(
            "grouped_wgrad_matmul",
            found=f"{dy.dtype}, {len(dy)} and {len(x)} rows",
            expected="bfloat16 and as many rows in either",
            remedy="Pass the gradient and the input of the same rows.",
        )
    dy, x = dy.contiguous(), x.contiguous()
    n, k = dy.shape[1], x.shape[1]
    out = torch.empty(tiles.starts.numel() - 1, n, k, dtype=dtype, device=x.device)
    if not len(x):
        return out.zero_()
    if out.numel():
        _wgrad_matmul_kernel[triton.cdiv(k, TALL), triton.cdiv(n, TALL), len(out)](
            *(dy, x, out, tiles.starts, tiles.first, tiles.rows, n, k),
            SIZE=TALL,
            TOKENS=_TOKENS,
            num_warps=8,
            num_stages=4,
        )
    return out


@triton.jit
def _wgrad_kernel(
    dy_desc, x_desc, out_ptr, starts_ptr, n, k, a_scale_ptr, b_scale_ptr, a_row, a_step, b_matrix, b_row, b_step,
    SIZE: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2).to(tl.int64)
    row, column = tl.program_id(1) * SIZE, tl.program_id(0) * SIZE
    rows, columns = row + tl.arange(0, SIZE), column + tl.arange(0, SIZE)
    acc = sum_products(
        dy_desc, x_desc, row, column, tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1), 1,
        a_scale_ptr + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * a_row, b_scale_ptr + column, a_step, b_step,
        "token_group", False, SIZE, SIZE, SIZE,
    )  # fmt: skip
    where = out_ptr + (expert * n + rows)[:, None] * k + columns[None, :]
    tl.store(where, cast(acc, out_ptr.dtype.element_ty), mask=(rows < n)[:, None] & (columns < k)[None, :])


@triton.jit
def _wgrad_matmul_kernel(
    dy_ptr, x_ptr, out_ptr, starts_ptr, first_ptr, rows_ptr, n, k, SIZE: tl.constexpr, TOKENS: tl.constexpr
):
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
    where = out_ptr + (expert * n + rows)[:, None] * k + columns[None, :]
    tl.store(where, cast(acc, out_ptr.dtype.element_ty), mask=(rows < n)[:, None] & (columns < k)[None, :])
