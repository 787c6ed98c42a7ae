"""Defines adapters: low-rank terms that are added to products of frozen weights (LoRA, Hu et al. 2021).

y = round(S + d). S is the FP32 sum of the base product (FP8 or BF16, its slices of K added in order) before it is
rounded. d = round(scale * (h B^T)) with h = round(x A^T). y, d and h are rounded to x's dtype, BF16; sums are FP32. h
is `linear` of the unquantized x, in as many slices of K as the base product has. h B^T sums over the rank. d is rounded
because matrix libraries add a BF16 matrix within a BF16 product. It is added before S is rounded, because a d below
half the last place of y would otherwise be lost. With B = 0, y has the bits of the base product.

A fused product has several matrices side by side, each with its own A. The operand says which A a row of B belongs to.
The bits of a row do not depend on what it is fused with, nor on the rows' order.

Gradients are low-rank products: dB = scale * dy^T h, dh = scale * dy B, dA = dh^T x, and dh A is added to the base
product's dx. None of them has the shape of the weight. The weight gets a gradient only if it requires one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.backend.dispatch import composed, note, op
from fp8rl.numerics.ops.grouped import group_of_rows, one_product_is_faster, spans
from fp8rl.numerics.ops.linear import linear, product, wide_mm


@dataclasses.dataclass(frozen=True)
class LowRank:
    """The adapter of one product, or of all experts, as the product takes it. a and b are BF16."""

    a: Tensor
    """[parts * r, K], the A of each matrix that the product fuses, one after the other; or [experts, parts * r, K] of
    experts with adapters of their own."""
    b: Tensor
    """[N, parts * r] or [experts, N, parts * r]: each row of B is in the columns of its part; the rest is zeros
    (`Fused.wide`)."""
    scale: float
    """alpha / rank."""
    parts: int = 1
    rows: Tensor | None = None
    """bool [T or more], True for the rows of x that have the adapter; None: all rows have it."""

    @property
    def per_expert(self) -> bool:
        """True if each expert has an adapter of its own."""
        return self.b.dim() == 3

    def of_expert(self, index: int) -> LowRank:
        return dataclasses.replace(self, a=self.a[index], b=self.b[index]) if self.per_expert else self

    def of_rows(self, index: Tensor) -> LowRank:
        """Return the adapter for these rows of x, int64 [T]."""
        return self if self.rows is None else dataclasses.replace(self, rows=self.rows[index])

    def on_rows(self, term: Tensor) -> Tensor:
        """Return the term d [T, ...], with -0 in the rows that do not have the adapter.

        Added to a sum, -0 changes no bit, not even the sign of a zero.
        """
        if self.rows is None:
            return term
        return torch.where(self.rows[: len(term)].view(-1, *(1,) * (term.dim() - 1)), term, -0.0)


@dataclasses.dataclass(frozen=True)
class Fused:
    """Maps the rows of B [M, r] to the N rows of a product that fuses matrices. Some matrices may have no adapter."""

    index: Tensor
    """int64 [M * r], the indices of B's elements in the flattened [N, parts * r]."""
    shape: tuple[int, int]
    """(N, parts * r)."""

    @classmethod
    def of(cls, rows: Tensor, part: Tensor, n: int, parts: int, rank: int) -> Fused:
        """Return the map of a B [M, r]. Its row i belongs to output rows[i] of the product and to matrix part[i] of A.

        rows, part: int64 [M].
        """
        first = (rows * parts + part) * rank
        return cls((first[:, None] + torch.arange(rank, device=rows.device)).flatten(), (n, parts * rank))

    def to(self, device: torch.device) -> Fused:
        return Fused(self.index.to(device), self.shape)

    def wide(self, b: Tensor) -> Tensor:
        """Return `LowRank.b` of B [M, r], or of each expert's [experts, M, r]."""
        zeros = b.new_zeros(*b.shape[:-2], self.shape[0] * self.shape[1])
        return zeros.index_copy(-1, self.index, b.flatten(-2)).unflatten(-1, self.shape)


def low_rank_of(x: Tensor, low_rank: LowRank, k_splits: int = 1) -> Tensor:
    """Return d [..., N] for the unquantized x [..., K]: the term that a product adds (`plus`) before it is rounded."""
    h = linear(x, low_rank.a, k_splits)
    return low_rank.on_rows(low_rank_term(h, low_rank.b, low_rank.scale, low_rank.parts))


@composed
def low_rank_term(h: Tensor, b: Tensor, scale: float, parts: int = 1) -> Tensor:
    """Compute round(scale * (h b^T)), h [..., parts * r] = round(x a^T) and b [N, parts * r] as in `LowRank`, -> [...,
    N].

    If ranks share K, h is merged from their `linear_partial`s, and `merge_partials` adds the term.
    """
    return _Term.apply(h, b, scale, parts, None)


@composed
def grouped_low_rank_term(h: Tensor, counts: Tensor, b: Tensor, scale: float, parts: int = 1) -> Tensor:
    """Compute `low_rank_term` with b [groups, N, parts * r] of each row's group.

    h [T, parts * r] is sorted by group, counts int64 [groups]; rows after the last group are as in `grouped_linear`.
    """
    return _Term.apply(h, b, scale, parts, spans(counts, h))


class _Term(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, b: Tensor, scale: float, parts: int, spans: Any) -> Tensor:
        ctx.save_for_backward(h, b)
        ctx.scale, ctx.spans = scale, spans
        return low_rank_product(h.reshape(-1, h.shape[-1]), b, scale, parts, spans).view(*h.shape[:-1], b.shape[-2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        h, b = ctx.saved_tensors
        dy = grads[0].reshape(-1, b.shape[-2])
        dh, db = low_rank_gradients(dy, h.reshape(-1, h.shape[-1]), b, ctx.spans)
        return (dh * ctx.scale).view(h.shape), db * ctx.scale, None, None, None


@op
def low_rank_product(h: Tensor, b: Tensor, scale: float, parts: int, spans: Any) -> Tensor:
    """Compute `low_rank_term`, or with spans `grouped_low_rank_term`, of h [T, parts * r] without a gradient."""
    paired = b.shape[-1] // parts % 2 == 0 and math.frexp(scale)[0] == 0.5
    if spans is None:
        return _scaled(h, b, scale, paired)
    if paired and one_product_is_faster(h, spans, b[0].numel()):
        wide, groups = h.new_zeros(len(h), len(b), b.shape[2]), group_of_rows(spans)
        wide[torch.arange(len(groups)), groups] = h[: len(groups)] * scale
        return product(wide.flatten(1), b.transpose(0, 1).flatten(1), h.dtype)
    out, grouped = h.new_empty(len(h), b.shape[1]), sum(spans)
    parts_of = (x[:grouped].split(list(spans)) for x in (out, h))
    for into, part, of_group in zip(*parts_of, b, strict=True):
        if len(part):
            into.copy_(_scaled(part, of_group, scale, paired))
    return out


@op
def low_rank_gradients(dy: Tensor, h: Tensor, b: Tensor, spans: Any) -> tuple[Tensor, Tensor]:
    """Return the gradients of h [T, parts * r] and of b from dy [T, N], without the factor `scale`."""
    if spans is None:
        return wide_mm(dy, b), wide_mm(dy.t(), h)
    groups = [*zip(dy.split(list(spans)), h.split(list(spans)), b, strict=True)]
    return torch.cat([wide_mm(d, m) for d, _, m in groups]), torch.stack([wide_mm(d.t(), r) for d, r, _ in groups])


def _scaled(h: Tensor, b: Tensor, scale: float, paired: bool) -> Tensor:
    """Compute round(scale * (h b^T)).

    Rounding commutes with a power of two, so with such a scale the matrix library may round the sum itself. The library
    adds BF16 terms in pairs. A sum has the same bits within a wider sum if it begins with a pair, so the rank has to be
    even, too. paired: both are so.
    """
    if paired:
        return product(h * scale, b, h.dtype)
    return (product(h, b, torch.float32) * scale).to(h.dtype)


# Adapters that are merged into the weight: the weight that is served, and the gradients of the adapter.
#
# The weight round(W + scale * B A) is multiplied with like any other, quantized or not, and no product knows the
# adapter. The gradient of a product's weight would be dy^T x [N, K]; A and B need products of it that have the rank as
# one of their sides: dh = scale * dy B, dA = dh^T x, dB = scale * dy^T h with h = x A^T. They are taken of dy and x as
# they are, whatever the weight is quantized to (straight through).


@torch.no_grad()
def merged(weight: Tensor, low_rank: LowRank) -> Tensor:
    """Return weight [..., N, K] + scale * B A, rounded to FP32 and then once to the weight's dtype.

    B A is summed in FP64. There the products of BF16 numbers are exact, and so are their sums, unless the numbers are
    of very different size. So it makes no difference in which order they are added, or how ranks share the weight.
    """
    if weight.dim() == 2:
        return updates(low_rank).add_(weight).float().to(weight.dtype)
    # Of experts one at a time: what is made here is four times as large as a weight.
    return torch.stack([merged(matrix, low_rank.of_expert(index)) for index, matrix in enumerate(weight)])


def updates(low_rank: LowRank) -> Tensor:
    """Return scale * B A, FP64 [N, K]."""
    a, b = low_rank.a.double(), low_rank.b.double()
    note("adapter.merged", a, b)
    return torch.mm(b, a).mul_(low_rank.scale)


def with_adapter_gradient(product: Tensor, x: Tensor, low_rank: LowRank, counts: Tensor | None = None) -> Tensor:
    """Return `product` unchanged in the forward; in the backward its gradient also goes to the adapter's A and B.

    product: [..., N], the product of x [..., K] with the merged weight. counts: int64 [experts], the rows of each
    expert in x [T, K], if each expert has its own adapter.
    """
    groups = counts.tolist() if counts is not None and low_rank.per_expert else None
    return _WithAdapterGradient.apply(product, x, low_rank.a, low_rank.b, low_rank.scale, groups)


def with_term_gradient(product: Tensor, term: Tensor) -> Tensor:
    """Return `product` unchanged in the forward; in the backward its gradient also goes to `term`, as if it were added.

    Both have the same shape.
    """
    return _WithTermGradient.apply(product, term)


class _WithTermGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, term: Tensor) -> Tensor:
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]


class _WithAdapterGradient(torch.autograd.Function):
    """Passes a product through and gives A and B gradients. a [R, K], b [N, R], or both with [groups] in front."""

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
            da, db = (torch.stack(found) for found in zip(*(_gradients(*group, ctx.scale) for group in groups)))
        return grads[0], None, da, db, None, None


def _gradients(dy: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of a [R, K] and b [N, R], in their dtype, from dy [T, N] and x [T, K]."""
    note("adapter.operands", dy, x, a, b)
    dh, h = wide_mm(dy, b) * scale, wide_mm(x, a.t()) * scale
    return wide_mm(dh.t(), x).to(a.dtype), wide_mm(dy.t(), h).to(b.dtype)
