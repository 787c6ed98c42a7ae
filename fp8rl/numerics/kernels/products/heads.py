"""Computes a product for each head (`numerics.ops.head_linear`) of unquantized rows and FP8 codes, without a copy.

A program takes 64 tokens and 128 columns of one head, and sums over K in steps of 64, ascending. Codes are dequantized
to BF16 after they are loaded. So a quantized weight is read once, one byte for each number, wherever heads cut blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import cast, dense_rows, dot
from fp8rl.numerics.kernels.products.linear import WeightOperand

_ROWS, _COLUMNS, _DEPTH, _BLOCK = 64, 128, 64, 128


def head_product(
    x: Tensor,
    weight: Tensor,
    operand: WeightOperand | None,
    first: int,
    count: int,
    transposed: bool = False,
    plus: Tensor | None = None,
) -> Tensor:
    x = dense_rows(x)
    (tokens, heads, k), rank = x.shape, weight.shape[1]
    codes, scale_inv = (weight, None) if operand is None else (operand.codes.data, operand.codes.scale_inv)
    columns = rank if transposed else count
    out = torch.empty(tokens, heads, columns, dtype=x.dtype, device=x.device)
    if out.numel():
        _kernel[-(-tokens // _ROWS), -(-columns // _COLUMNS), heads](
            *(x, codes, scale_inv, None if plus is None else plus.contiguous(), out, tokens, heads, columns, k),
            *(*x.stride()[:2], len(weight) // heads, first, rank, 0 if scale_inv is None else scale_inv.stride(0)),
            TRANSPOSED=transposed,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            DEPTH=_DEPTH,
            BLOCK=_BLOCK,
            num_warps=4,
            num_stages=3,
        )
    return out


@triton.jit(do_not_specialize=["tokens"])
def _kernel(
    x_ptr, weight_ptr, scale_ptr, plus_ptr, out_ptr, tokens, heads, columns, k, x_token, x_head,
    head_rows, first, rank, scale_row,
    TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x_ptr += tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * x_token + head * x_head
    begin = head * head_rows + first  # the first of the head's rows in the weight
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, k, DEPTH):
        step = start + tl.arange(0, DEPTH)
        x = tl.load(x_ptr + step[None, :], mask=(step < k)[None, :], other=0.0)
        # [DEPTH, COLUMNS] of what x is multiplied by
        if TRANSPOSED:
            row, at = (begin + step)[:, None], column[None, :]
        else:
            row, at = (begin + column)[None, :], step[:, None]
        inside = (step < k)[:, None] & (column < columns)[None, :]
        w = tl.load(weight_ptr + row.to(tl.int64) * rank + at, mask=inside, other=0.0)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + row // BLOCK * scale_row + at // BLOCK, mask=inside, other=0.0)
            w = cast(w.to(tl.float32) * scale, tl.bfloat16)
        total = dot(x, w, total)
    where = (token.to(tl.int64)[:, None] * heads + head) * columns + column[None, :]
    exists = (token < tokens)[:, None] & (column < columns)[None, :]
    if plus_ptr is not None:
        total += tl.load(plus_ptr + where, mask=exists, other=0.0).to(tl.float32)
    tl.store(out_ptr + where, cast(total, tl.bfloat16), mask=exists)
