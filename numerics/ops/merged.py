"""Adapters that are merged into the weight: the weight that is served, and the gradients of the adapter.

The weight round(W + scale * B A) is multiplied with like any other, quantized or not, and no product knows the adapter.
The gradient of a product's weight would be dy^T x [N, K]; A and B need products of it that have the rank as one of
their sides: dh = scale * dy B, dA = dh^T x, dB = scale * dy^T h with h = x A^T. They are taken of dy and x as they are,
whatever the weight is quantized to (straight through).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.ops.linear import wide_mm
from fp8rl.numerics.ops.low_rank import LowRank


@torch.no_grad()
def merged(weight: Tensor, low_rank: LowRank) -> Tensor:
    """Return weight [..., N, K] + scale * B A, rounded to FP32 and then once to the weight's dtype.

    B A is summed in FP64, where the products of BF16 numbers are exact and so are, but for numbers of very different
    size, their sums: the order of the sum, and with it how ranks share the weight, makes no difference.
    """
    if weight.dim() == 2:
        return updates(low_rank).add_(weight).float().to(weight.dtype)
    # Of experts one at a time: what is made here is four times as large as a weight.
    return torch.stack([merged(each, low_rank.of_expert(index)) for index, each in enumerate(weight)])


def updates(low_rank: LowRank) -> Tensor:
    """Return scale * B A, FP64 [N, K]."""
    return torch.mm(low_rank.b.double(), low_rank.a.double()).mul_(low_rank.scale)


def reaching(product: Tensor, x: Tensor, low_rank: LowRank, counts: Tensor | None = None) -> Tensor:
    """Return `product` [..., N] of x [..., K] and `merged`, as it is; its gradient reaches a and b of the adapter.

    counts: int64 [experts], where each group of rows [T, K] has an adapter of its own.
    """
    groups = counts.tolist() if counts is not None and low_rank.per_expert else None
    out: Tensor = _Reaching.apply(product, x, low_rank.a, low_rank.b, low_rank.scale, groups)
    return out


def reaching_term(product: Tensor, term: Tensor) -> Tensor:
    """Return `product`, as it is; its gradient reaches the inputs of `term`, of the same shape, as if it were added."""
    out: Tensor = _ReachingTerm.apply(product, term)
    return out


class _ReachingTerm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, term: Tensor) -> Tensor:
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]


class _Reaching(torch.autograd.Function):
    """a [R, K], b [N, R], or of each group [groups, R, K] and [groups, N, R]."""

    @staticmethod
    def forward(
        ctx: Any, product: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, groups: Sequence[int] | None
    ) -> Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.scale, ctx.groups = scale, groups
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b = ctx.saved_tensors
        rows = x.flatten(0, -2)
        dy = grads[0].flatten(0, -2).to(x.dtype)
        if ctx.groups is None:
            da, db = _gradients(dy, rows, a, b, ctx.scale)
        else:
            groups = zip(dy.split(ctx.groups), rows.split(ctx.groups), a, b, strict=True)
            da, db = (torch.stack(found) for found in zip(*(_gradients(*each, ctx.scale) for each in groups)))
        return grads[0], None, da, db, None, None


def _gradients(dy: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of a [R, K] and b [N, R], in their dtype, from dy [T, N] and x [T, K]."""
    dh, h = wide_mm(dy, b) * scale, wide_mm(x, a.t()) * scale
    return wide_mm(dh.t(), x).to(a.dtype), wide_mm(dy.t(), h).to(b.dtype)
