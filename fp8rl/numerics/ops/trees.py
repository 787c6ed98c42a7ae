"""Defines attention of rows that share prefixes. Each shared token is laid out and computed once.

Rows are in lexicographic order. Of each row only the tokens after its common prefix with the previous row are laid out,
end to end. They form a prefix tree. A token attends to its path from the root, which is its row up to the token. So its
result has the bits that `ops.attention` gives in each row that shares the token. In this order the descendants of a
token are an interval of tokens: query q has key k on its path if and only if k <= q < end[k].

The gradient of a token is the sum over all its rows, added in FP32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.backend.dispatch import op
from fp8rl.numerics.ops.attention import TokenTree, attention, padded_sequences


@op
def tree_attention(q: Tensor, k: Tensor, v: Tensor, tree: TokenTree, scale: float) -> Tensor:
    """Compute `attention` of each token over the keys on its path, bit for bit.

    q [T, heads, D]; k [T, kv heads, D]; v [T, kv heads, E]. Returns [T, heads, E].
    """
    k, v = k.float(), v.float()  # as the definition takes them: gradients of rows meet before they are rounded
    results, order = [], []
    rows = torch.arange(len(tree.new), device=q.device)
    for tokens, slots, positions, real in padded_sequences(tree.table, rows, tree.new, tree.lengths):
        out = attention(gathered(q, tokens), gathered(k, slots), gathered(v, slots), positions, scale)
        results.append(out[real])
        order.append(tokens[real])
    return torch.cat(results)[torch.cat(order).argsort()]


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index], whose gradient is added up in FP32 in the order of `index`, and rounded once.

    x [N, ...], index int64 of any shape.
    """
    return _Gathered.apply(x, index)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        rows = grads[0].float().reshape(index.numel(), -1)
        total = rows.new_zeros(ctx.shape[0], rows.shape[1])
        add_by_token(total, rows, index.flatten())
        return total.view(ctx.shape).to(ctx.dtype), None


@op
def add_by_token(total: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Add to each row of `total`, which belongs to a token, the sum of that token's rows.

    total [V, H], FP32 or the rows' dtype. rows [T, H], tokens int64 [T]; a token outside 0 to V - 1 is another rank's,
    and left out. The rows of a token are added in their order, in FP32, and their sum is rounded once to their dtype.
    """
    mine = (tokens >= 0) & (tokens < len(total))
    tokens, rows = tokens[mine], rows[mine]
    ordered, counts = rows[tokens.argsort(stable=True)].float(), tokens.bincount(minlength=len(total))
    sums = torch.segment_reduce(ordered, "sum", lengths=counts, axis=0, initial=0.0, unsafe=True)
    total.add_(sums.to(rows.dtype))
