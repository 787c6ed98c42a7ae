"""Computes attention over prefix trees, and sums rows by token (`numerics.ops.trees`).

For a query, the tree's tokens are the slots of a paged cache, and its row's path is the table. So the forward and the
gradient of queries read keys from slots, in the splits and chunks of the path. For a key, the queries are an interval:
query q sees key k if k <= q < end[k]. So a tile of keys reads the queries from its first key to its largest end. One
program adds up a token's gradient over the rows that share the token, in the order of this interval, in FP32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import as_rows, cast, dense_rows
from fp8rl.numerics.kernels.attention.forward import Attention, check
from fp8rl.numerics.ops.attention import TokenTree

_BLOCK = 1024


def tree_attention(q: Tensor, k: Tensor, v: Tensor, tree: TokenTree, scale: float) -> Tensor:
    """Compute `numerics.ops.tree_attention` without a wait for the device (as `forward.packed_attention`). Raises
    UserError as `forward.attention` does."""
    check(q, k, v)
    rows = (dense_rows(x)[None] for x in (q, k, v))
    return Attention.apply(*rows, torch.arange(len(q), device=q.device)[None], scale, None, tree)[0]


def add_by_token(total: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Compute `numerics.ops.add_by_token` in place, without atomics and without a wait for the host.

    Rows are sorted by token. The program at a token's first row adds all rows of the token, in their order; other
    programs have no work. No tensor of the vocabulary's size is made. Rows of `total` without a token stay as they are.
    """
    rows = as_rows(rows)
    if not rows.numel():
        return
    ordered, order = tokens.sort(stable=True)
    ends = torch.searchsorted(ordered, ordered, right=True)
    _add_kernel[len(rows), -(-rows.shape[1] // _BLOCK)](
        *(total, rows, ordered, order, ends, *total.shape, rows.stride(0)),
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["vocabulary"])
def _add_kernel(
    total_ptr, rows_ptr, token_ptr, order_ptr, end_ptr, vocabulary, hidden, stride, BLOCK: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0)
    token = tl.load(token_ptr + first)
    before = tl.load(token_ptr + first - 1, mask=first > 0, other=-1)
    end = first
    if (token >= 0) & (token < vocabulary) & (token != before):
        end = tl.load(end_ptr + first).to(tl.int32)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    acc = tl.zeros((BLOCK,), tl.float32)
    for place in range(first, end):
        row = tl.load(order_ptr + place)
        acc += tl.load(rows_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    at = total_ptr + token * hidden + column
    there = inside & (end > first)
    sum_of_rows = cast(acc, rows_ptr.dtype.element_ty).to(tl.float32)
    held = tl.load(at, mask=there, other=0.0).to(tl.float32)
    tl.store(at, cast(held + sum_of_rows, total_ptr.dtype.element_ty), mask=there)
