"""Grouped products: rows sorted by group, each group with a weight of its own, as in the experts of an MoE layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.backend.dispatch import composed, op
from fp8rl.numerics.ops.linear import FEWEST_ROWS, Backward, chooses_by_rows, dense, product, wide_mm
from fp8rl.numerics.quantize import fake_quantize_columns, fake_quantize_rows
from fp8rl.numerics.spec import QuantSpec, TensorSpec

_CALL = 1 << 22  # multiplications in the time of a call of the matrix library
_WEIGHTS_AS_ROWS = 64  # reading a matrix takes as long as so many rows of its products


@composed
def grouped_linear(
    x: Tensor,
    counts: Tensor,
    weights: Sequence[Tensor] | Tensor,
    operand: Any = None,
    spec: QuantSpec | None = None,
    backward: Backward = "fp8",
    plus: Tensor | None = None,
) -> Tensor:
    """Compute `linear` of each row with its group's weight, or `fp8_linear` if there are an operand and a spec.

    x [T, K], the first counts[0] rows in group 0, and so on; counts int64 [groups]. weights [N, K] each, or [groups, N,
    K], receive the gradients (`Gradients`); operand is their `group_operand`, the `weight_operand` of their stack, or
    its `Frozen`. plus [T, N]: as in `linear`. Returns [T, N] in x's dtype. Rows are quantized in one go; for wgrad,
    blocks along the tokens begin anew in each group. A group may be empty. Only a call without gradients may have rows
    after the last group. They are not computed: their results are undefined.
    """
    if spec is None or operand is None:
        operand = weights.detach() if isinstance(weights, Tensor) else [weight.detach() for weight in weights]
        spec, backward = None, "bf16"
    given = given_to_autograd(weights)
    return _GroupedProduct.apply(x, spans(counts, x), operand, spec, backward, Gradients.of(weights), plus, *given)


@op
def spans(counts: Tensor, x: Tensor) -> Any:
    """Return where each group's rows are in x, in the form that the ops below take: here, the rows of each group."""
    return counts.tolist()


@op
def grouped_product(x: Tensor, spans: Any, operand: Any, spec: QuantSpec | None, n: int, plus: Tensor | None) -> Tensor:
    """Compute `grouped_linear` [T, n] without a gradient. Without a spec the operand is the weights themselves."""
    plain, stops = spec is None and plus is None, list(accumulate(spans))
    if plain and isinstance(operand, Tensor) and stops[-1] == len(x):
        if one_product_is_faster(x, spans, n * x.shape[1]):
            return side_by_side(x, spans, operand)
    rows, out = x if spec is None else fake_quantize_rows(x, spec.activation), x.new_empty(len(x), n)
    for start, stop, weight in zip([0, *stops[:-1]], stops, operand, strict=True):
        if start < stop:
            _span_product(rows, start, stop, dense(weight), plus, out)
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
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Return the gradient of x, and the weights' gradients as autograd takes them: none if x is None."""
    dtype, rows, counts = dy.dtype, x, spans
    if spec is not None and backward == "bf16":
        rows, spec = None if x is None else fake_quantize_rows(x, spec.activation), None
        dy = dy if rows is None else dy.to(rows.dtype)
    dy_rows = dy if spec is None else fake_quantize_rows(dy, spec.gradient)
    parts = zip(dy_rows.split(list(counts)), operand, strict=True)
    found = [wide_mm(part, dense(weight)) for part, weight in parts if len(part)]
    dx = torch.cat(found).to(dtype) if found else dense(operand[0])[:0].to(dtype)
    if rows is None:
        return dx, ()
    if spec is not None:
        roles = (spec.gradient, spec.activation)
        multiple = math.lcm(*(r.group for r in roles if r.quantized and r.granularity == "token_group"))
        (dy, rows), counts = _padded((dy, rows), counts, multiple)
        dy, rows = (_quantize_groups(x, counts, role) for x, role in zip((dy, rows), roles, strict=True))
    return dx, _weight_gradients(dy, rows, counts, gradients)


def given_to_autograd(weights: Sequence[Tensor] | Tensor) -> tuple[Tensor, ...]:
    """Return the weights as inputs of a grouped product in autograd: each matrix, or the one stack of all."""
    return (weights,) if isinstance(weights, Tensor) else tuple(weights)


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The place and the form of the gradients of a grouped product's weights."""

    stacked: bool
    """The weights are one tensor [groups, N, K]."""
    dtype: torch.dtype
    """The weights' dtype, to which each gradient is rounded."""
    total: Tensor | None
    """FP32 [groups, N, K], Megatron-core's `main_grad` of a stacked parameter: the backward adds the gradients to it.
    None: the backward returns them to autograd."""

    @classmethod
    def of(cls, weights: Sequence[Tensor] | Tensor) -> Gradients:
        stacked = isinstance(weights, Tensor)
        return cls(stacked, weights[0].dtype, getattr(weights, "main_grad", None) if stacked else None)

    def returned(self, found: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return gradients [groups, N, K] as autograd takes them. found: None if they were added to the total."""
        return (found,) if found is None or self.stacked else found.unbind(0)


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
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x if any(ctx.needs_input_grad[7:]) else None)
        ctx.constants, ctx.operands = (spans, operand, spec, backward, gradients), operand if spec is None else ()
        return grouped_product(x, spans, operand, spec, weights[0].shape[-2], plus)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dx, dw = grouped_gradients(grads[0], ctx.saved_tensors[0], *ctx.constants)
        dplus = grads[0] if ctx.needs_input_grad[6] else None
        return dx, *(None,) * 5, dplus, *(dw or (None,) * len(ctx.needs_input_grad[7:]))


def _weight_gradients(dy: Tensor, rows: Tensor, counts: Sequence[int], gradients: Gradients) -> Sequence[Tensor | None]:
    """Return the gradients as autograd takes them, each of dy [T, N] and rows [T, K] of its group."""
    groups = zip(dy.split(list(counts)), rows.split(list(counts)), strict=True)
    found = (wide_mm(d.t(), r).to(gradients.dtype) if d.shape[0] else None for d, r in groups)
    if not gradients.stacked:
        return list(found)
    total = gradients.total
    into = dy.new_zeros(len(counts), dy.shape[1], rows.shape[1], dtype=gradients.dtype) if total is None else total
    for place, gradient in zip(into, found, strict=True):
        if gradient is not None:
            place.add_(gradient)
    return [into if total is None else None]


def one_product_is_faster(x: Tensor, counts: Sequence[int], work: int) -> bool:
    """Return True if one product of all rows with the matrices of all groups, side by side, is faster than one per
    group.

    The bits are the same. One product is faster where a call costs more than its computation. work: number of
    multiplications of a row with a matrix.
    """
    used = sum(map(bool, counts))
    fast = len(counts) * work * (len(x) + _WEIGHTS_AS_ROWS) <= used * _CALL
    return fast and x.device.type == "cpu" and not chooses_by_rows(x.device, x.dtype)


def side_by_side(x: Tensor, counts: Sequence[int], stack: Tensor) -> Tensor:
    """Multiply rows x [T, K] with their groups' matrices of stack [groups, N, K], by one product with all -> [T, N]."""
    whole = product(x, stack.flatten(0, 1), x.dtype).unflatten(1, stack.shape[:2])
    return whole[torch.arange(len(x)), group_of_rows(counts)]


def group_of_rows(counts: Sequence[int]) -> Tensor:
    """Return the group of each row, int64 [T]."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def _span_product(rows: Tensor, start: int, stop: int, weight: Tensor, plus: Tensor | None, out: Tensor) -> None:
    """Fill rows start to stop of `out`. A short span is computed with neighbouring rows, whose results are dropped."""
    if (
        stop - start >= FEWEST_ROWS
        and rows.dtype == weight.dtype == out.dtype
        and not chooses_by_rows(rows.device, rows.dtype)
    ):
        into = out[start:stop]
        if plus is None:
            torch.mm(rows[start:stop], weight.t(), out=into)
        else:
            torch.addmm(plus[start:stop], rows[start:stop], weight.t(), out=into)
        return
    first = max(0, min(start, rows.shape[0] - FEWEST_ROWS))
    last = max(stop, min(first + FEWEST_ROWS, rows.shape[0]))
    more = None if plus is None else plus[first:last]
    out[start:stop] = product(rows[first:last], weight, out.dtype, more)[start - first : stop - first]


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
