"""Defines the routed experts of an MoE layer: their choice, two grouped products with SwiGLU, and the weighted sum."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.backend.dispatch import note, op
from fp8rl.numerics.ops.gates import sigmoid, swiglu
from fp8rl.numerics.ops.grouped import grouped_linear
from fp8rl.numerics.ops.linear import Backward
from fp8rl.numerics.ops.low_rank import LowRank, grouped_low_rank_term, low_rank_of
from fp8rl.numerics.spec import QuantSpec

SMALLEST_SUM = 1e-20
"""The number that is added to the sum by which sigmoids are divided."""


def top_experts(probs: Tensor, top_k: int) -> Tensor:
    """Return the k most probable experts int64 [T, k] of probs [T, E]; among equals the lower ids."""
    return torch.sort(probs, dim=-1, descending=True, stable=True).indices[:, :top_k]


@op
def route(
    logits: Tensor, top_k: int, renormalize: bool, given: Tensor | None = None, ids: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor]:
    """Take the top k of a softmax in FP32 over all experts; if `renormalize`, divide their probabilities by their sum.

    logits [T, E] -> probabilities FP32 [T, k] and experts [T, k] as `ids`, in ascending expert id within a token, which
    is also the order in which their outputs are added (`combine`). Gradients flow through the probabilities alone.

    given: int64 [T, k], an earlier choice to replay, in any order. Nothing else changes. None: choose here.
    """
    probs = logits.float().softmax(-1)
    note("router.softmax", probs)
    experts = (top_experts(probs.detach(), top_k) if given is None else given).sort(-1).values
    chosen = probs.gather(1, experts)
    return (chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen), experts.to(ids)


@op
def route_sigmoid(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    groups: int,
    kept_groups: int,
    renormalize: bool,
    factor: float,
    given: Tensor | None = None,
    ids: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """Take the top k of sigmoid + bias within the best groups of experts, and scale the sigmoids of the chosen experts.

    It is the router of DeepSeek-V3 (arXiv 2412.19437, 2.1.2) and GLM-4.5. logits FP32 [T, E], bias FP32 [E]. An
    expert's score is sigmoid(logit) + bias. Experts are cut into `groups` equal groups, and the `kept_groups` groups
    are kept whose two best scores have the largest sums. The k best experts of the kept groups are taken. Ties go to
    the lower group and the lower id. Probabilities are the sigmoids without bias: divided by their sum + 1e-20 if
    `renormalize`, then times `factor`.

    Returns probabilities FP32 [T, k] and experts [T, k] as `ids`, in ascending expert id within a token. Gradients flow
    through the probabilities alone. given: as in `route`.
    """
    scores = sigmoid(logits.float())
    if given is None:
        given = top_experts(kept_scores(scores.detach() + bias, groups, kept_groups), top_k)
    experts = given.sort(-1).values
    chosen = scores.gather(1, experts)
    note("router.softmax", scores)
    chosen = chosen / (chosen.sum(-1, keepdim=True) + SMALLEST_SUM) if renormalize else chosen
    return chosen * factor, experts.to(ids)


def kept_scores(scores: Tensor, groups: int, kept_groups: int) -> Tensor:
    """Return scores [T, E] with -inf outside the `kept_groups` groups whose best pairs have the largest sums."""
    if groups == kept_groups:
        return scores
    best = scores.unflatten(-1, (groups, -1)).sort(dim=-1, descending=True, stable=True).values
    order = (best[..., 0] + best[..., 1]).sort(dim=-1, descending=True, stable=True).indices
    kept = torch.zeros_like(best[..., 0], dtype=torch.bool).scatter(1, order[:, :kept_groups], True)
    return scores.masked_fill(~kept.repeat_interleave(scores.shape[1] // groups, 1), -torch.inf)


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """One matrix of every expert."""

    weights: Tensor
    """[experts, N, K]"""
    operand: Any = None
    """The operand of the weights; None: they are not quantized."""
    low_rank: LowRank | None = None
    """The adapters of the experts, or one adapter for all experts; None: there is no adapter."""

    def of_rows(self, index: Tensor) -> ExpertWeights:
        """Return the weights with the adapter for these rows of x, int64 [T]."""
        return self if self.low_rank is None else dataclasses.replace(self, low_rank=self.low_rank.of_rows(index))


@op
def experts(
    x: Tensor,
    counts: Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    spec: QuantSpec | None = None,
    backward: Backward = "fp8",
) -> Tensor:
    """Run each expert's MLP on its own tokens: x [T, H] sorted by expert, counts int64 [experts], -> [T, H].

    An expert's w13 is [2F, H], gate rows first; its w2 is [H, F]. Results are rounded to x's dtype after each of the
    two products and after SwiGLU. Adapters are added as `numerics.ops.low_rank` says. The router's probability is
    applied by the caller, after this. An expert may have no tokens.
    """
    hidden = swiglu(adapted_grouped_linear(x, counts, w13, spec, backward))
    return adapted_grouped_linear(hidden, counts, w2, spec, backward)


def adapted_grouped_linear(
    x: Tensor, counts: Tensor, w: ExpertWeights, spec: QuantSpec | None, backward: Backward
) -> Tensor:
    """Compute `grouped_linear` with these weights, and with their adapter if there is one."""
    low_rank, plus = w.low_rank, None
    if low_rank is not None and low_rank.per_expert:
        h = grouped_linear(x, counts, low_rank.a)
        plus = low_rank.on_rows(grouped_low_rank_term(h, counts, low_rank.b, low_rank.scale, low_rank.parts))
    elif low_rank is not None:
        plus = low_rank_of(x, low_rank)
    return grouped_linear(x, counts, w.weights, w.operand, spec, backward, plus)


def group_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the order [T * k] that sorts (token, choice) pairs of int64 [T, k] by expert, and tokens per expert."""
    flat = experts.reshape(-1)
    counts = flat.new_zeros(num_experts).scatter_add(0, flat, torch.ones_like(flat))
    return flat.argsort(stable=True), counts


@op
def routed_experts(
    x: Tensor,
    probs: Tensor,
    chosen: Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    spec: QuantSpec | None = None,
    backward: Backward = "fp8",
    rows: Any = None,
) -> Tensor:
    """Run each token of x [T, H] through its experts, and add up their outputs, weighted: [T, H].

    probs FP32 [T, k], chosen int [T, k]: as `route` gives them. w13, w2: the stacked weights; `LowRank.rows` of an
    adapter are tokens. rows: x as `norm_rows` quantized it; None: x is quantized here. This is one op, so that a kernel
    can lay out the pairs of tokens and experts in one step.
    """
    order, counts = group_by_expert(chosen.long(), len(w13.weights))
    token, pairs = order // chosen.shape[1], rows_of_pairs(x, order, chosen.shape[1])
    outputs = experts(pairs, counts, w13.of_rows(token), w2.of_rows(token), spec, backward)
    return combine(outputs, probs, order, x.dtype)


def rows_of_pairs(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Copy each token once for each of its experts: x [T, H] -> rows [T * k, H].

    order: int64 [T * k], for each row its (token, choice) pair as token * k + choice. The choices of a token are in
    ascending order of experts. A token's gradient is the FP32 sum of its rows' gradients in this order, rounded once.
    """
    return _Rows.apply(x, order, top_k)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = len(x), top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        ones = torch.ones(ctx.shape, dtype=torch.float32, device=order.device)
        return combine(grads[0], ones, order, grads[0].dtype), None, None


@op
def combine(outputs: Tensor, probs: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weighted sum over each token's experts, in ascending expert id, in FP32, rounded once to `dtype`.

    outputs [T * k, H] in the order of `group_by_expert`, probs FP32 [T, k] as `route` gives them -> [T, H].
    """
    weighted = torch.empty(outputs.shape, dtype=torch.float32, device=outputs.device)
    weighted[order] = outputs.float() * probs.reshape(-1)[order, None]
    return sum_in_order(weighted.reshape(*probs.shape, -1)).to(dtype)


def sum_in_order(choices: Tensor) -> Tensor:
    """Sum the k choices of each token, the first to the last: [T, k, H] -> [T, H]."""
    total = choices[:, 0]
    for choice in range(1, choices.shape[1]):
        total = total + choices[:, choice]
    return total
