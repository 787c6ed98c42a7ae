"""Defines products of rows that are sorted by group, each group with its own weight, as in experts of an MoE layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.backend.dispatch import composed, op
from fp8rl.numerics.ops.linear import FEWEST_ROWS, Backward, chooses_by_rows, dense, filled_up, product, wide_mm
from fp8rl.numerics.quantize import fake_quantize_columns, fake_quantize_rows
from fp8rl.numerics.spec import QuantSpec, TensorSpec

_CALL = 1 << 22  # multiplications in the time of a call of the matrix library
_WEIGHTS_AS_ROWS = 64  # reading a matrix takes as long as so many rows of its products


@composed
def grouped_linear(
    x: Tensor,
    counts: Tensor,
    weights: Tensor,
    operand: Any = None,
    spec: QuantSpec | None = None,
    backward: Backward = "fp8",
    plus: Tensor | None = None,
) -> Tensor:
    """Compute `linear` of each row with its group's weight, or `fp8_linear` if there are an operand and a spec.

    x [T, K], the first counts[0] rows in group 0, and so on; counts int64 [groups]. weights [groups, N, K] receive the
    gradients (`Gradients`); operand: as in `fp8_linear`. plus [T, N]: as in `linear`. Returns [T, N] in x's dtype. Rows
    are quantized in one call; for wgrad, blocks along tokens begin again in each group. A group may be empty. Only a
    call without gradients may have rows after the last group. Their results are undefined.
    """
    if spec is None or operand is None:
        operand, spec, backward = weights.detach(), None, "bf16"
    return _GroupedProduct.apply(x, spans(counts, x), operand, spec, backward, Gradients.of(weights), plus, weights)


@op
def spans(counts: Tensor, x: Tensor) -> Any:
    """Return where each group's rows are in x, as the ops below need it: here the number of rows of each group."""
    return counts.tolist()


@op
def grouped_product(x: Tensor, spans: Any, operand: Any, spec: QuantSpec | None, n: int, plus: Tensor | None) -> Tensor:
    """Compute `grouped_linear` [T, n] without a gradient. Without a spec the operand is the weights themselves."""
    plain = spec is None and plus is None
    if plain and sum(spans) == len(x) and one_product_is_faster(x, spans, n * x.shape[1]):
        whole = product(x, operand.flatten(0, 1), x.dtype).unflatten(1, operand.shape[:2])
        return whole[torch.arange(len(x)), group_of_rows(spans)]
    rows, out = x if spec is None else fake_quantize_rows(x, spec.activation), x.new_empty(len(x), n)
    for (start, stop), weight in zip(pairwise(accumulate(spans, initial=0)), operand, strict=True):
        if start < stop:  # rows behind a span are its neighbours', whose products come next
            span = slice(start, start + filled_up(stop - start))
            out[span] = product(rows[span], dense(weight), out.dtype, None if plus is None else plus[span])
    return out


@op
def grouped_gradients(
    dy: Tensor,
    x: Tensor | None,
    spans: Any,
    operand: Any,
    spec: QuantSpec | None,
    backward: Backward,
    gradients: Gradients,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of x and, unless x is None, the weights' gradient as `Gradients` says."""
    dtype, rows, counts = dy.dtype, x, spans
    if spec is not None and backward == "bf16":
        rows, spec = None if x is None else fake_quantize_rows(x, spec.activation), None
        dy = dy if rows is None else dy.to(rows.dtype)
    dy_rows = dy if spec is None else fake_quantize_rows(dy, spec.gradient)
    parts = zip(pairwise(accumulate(counts, initial=0)), operand, strict=True)
    found = [_span_gradient(dy_rows, start, stop, dense(weight)) for (start, stop), weight in parts if start < stop]
    dx = torch.cat(found).to(dtype) if found else dense(operand[0])[:0].to(dtype)
    if rows is None:
        return dx, None
    if spec is not None:
        roles = (spec.gradient, spec.activation)
        multiple = math.lcm(*(r.group for r in roles if r.quantized and r.granularity == "token_group"))
        (dy, rows), counts = _padded((dy, rows), counts, multiple)
        dy, rows = (_quantize_groups(x, counts, role) for x, role in zip((dy, rows), roles, strict=True))
    return dx, _weight_gradients(dy, rows, counts, gradients)


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The dtype and the destination of the gradient of a grouped product's weights [groups, N, K]."""

    dtype: torch.dtype
    """The weights' dtype, to which the gradient is rounded."""
    total: Tensor | None
    """FP32 [groups, N, K], Megatron-core's `main_grad`: the backward adds the gradient to it, and autograd gets none.
    None: the backward returns the gradient to autograd."""

    @classmethod
    def of(cls, weights: Tensor) -> Gradients:
        return cls(weights.dtype, getattr(weights, "main_grad", None))


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        spans: Any,
        operand: Any,
        spec: QuantSpec | None,
        backward: Backward,
        gradients: Gradients,
        plus: Tensor | None,
        weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[7] else None)
        ctx.constants, ctx.operands = (spans, operand, spec, backward, gradients), operand if spec is None else ()
        return grouped_product(x, spans, operand, spec, weights.shape[1], plus)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dx, dw = grouped_gradients(grads[0], ctx.saved_tensors[0], *ctx.constants)
        dplus = grads[0] if ctx.needs_input_grad[6] else None
        return dx, *(None,) * 5, dplus, dw


def _weight_gradients(dy: Tensor, rows: Tensor, counts: Sequence[int], gradients: Gradients) -> Tensor | None:
    """Return the weights' gradient as `Gradients` says, of each group from its dy [T, N] and rows [T, K]."""
    total = gradients.total
    into = dy.new_zeros(len(counts), dy.shape[1], rows.shape[1], dtype=gradients.dtype) if total is None else total
    for place, d, r in zip(into, dy.split(list(counts)), rows.split(list(counts)), strict=True):
        if len(d):
            place.add_(wide_mm(d.t(), r).to(gradients.dtype))
    return into if total is None else None


def one_product_is_faster(x: Tensor, counts: Sequence[int], work: int) -> bool:
    """Return True if one product of all rows with the matrices of all groups, side by side, is faster than one per
    group.

    The bits are the same. One product is faster if a call costs more than its computation. work: number of
    multiplications of a row with a matrix.
    """
    used = sum(map(bool, counts))
    fast = len(counts) * work * (len(x) + _WEIGHTS_AS_ROWS) <= used * _CALL
    return fast and x.device.type == "cpu" and not chooses_by_rows(x.device, x.dtype)


def group_of_rows(counts: Sequence[int]) -> Tensor:
    """Return the group of each row, int64 [T]."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def _span_gradient(dy: Tensor, start: int, stop: int, weight: Tensor) -> Tensor:
    """Return dy[start:stop] @ weight. The library gets neighbouring rows too if that changes no bit."""
    count = filled_up(stop - start)
    first = min(start, len(dy) - count)
    alone = first < 0 or stop - start < FEWEST_ROWS or dy.dtype != weight.dtype
    if alone or chooses_by_rows(dy.device, dy.dtype):
        first, count = start, stop - start
    return wide_mm(dy[first : first + count], weight)[start - first : stop - first]


def _padded(tensors: Sequence[Tensor], counts: Sequence[int], multiple: int) -> tuple[Sequence[Tensor], Sequence[int]]:
    """Return tensors [T, ...] with each group filled up to a multiple of rows with zeros, and the rows per group."""
    if multiple == 1:
        return tensors, counts
    padded = [-(-count // multiple) * multiple for count in counts]
    shifts = torch.tensor([0, *accumulate(p - c for p, c in zip(padded, counts, strict=True))][:-1])
    shift = torch.repeat_interleave(shifts, torch.tensor(list(counts))).to(tensors[0].device)
    place = torch.arange(len(shift), device=shift.device) + shift
    spread = [x.new_zeros(sum(padded), x.shape[1]) for x in tensors]
    for x, room in zip(tensors, spread, strict=True):
        room[place] = x
    return spread, padded


def _quantize_groups(x: Tensor, counts: Sequence[int], spec: TensorSpec) -> Tensor:
    """Return x quantized along the tokens of each group. For `token_group` scales, counts are multiples of `group`."""
    if spec.granularity == "token_group":
        return fake_quantize_columns(x, spec)
    return torch.cat([fake_quantize_columns(part, spec) for part in x.split(list(counts))])
