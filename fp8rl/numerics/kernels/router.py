"""Chooses experts (`numerics.ops.experts`): softmax or sigmoid, top-k and renormalisation in one kernel.

A program holds a few tokens and all of their experts. Sums over experts are added in pairs, with 0 for experts that do
not count. So probabilities depend neither on the logits' dtype nor on who chose the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.kernels.arithmetic import pairwise_sum
from fp8rl.numerics.ops.experts import SMALLEST_SUM

_TOKENS = 4
"""Tokens of a program: one for each of its warps."""


def route(
    logits: Tensor, top_k: int, renormalize: bool, given: Tensor | None = None, ids: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor]:
    """Compute `numerics.ops.route`. If k different experts are given, they have the same probabilities, bit for bit, as
    if the kernel had chosen them. Raises UserError: k is not from 1 to E."""
    _check(top_k, logits)

    def probabilities(logits: Tensor, chosen: Tensor) -> Tensor:
        probs = logits.softmax(-1).gather(1, chosen)
        return probs / probs.sum(-1, keepdim=True) if renormalize else probs

    constants = {"TOP_K": top_k, "RENORMALIZE": renormalize}
    return _Route.apply(logits, (), _route_kernel, constants, given, ids, probabilities)


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
    """Route as `numerics.ops.experts.route_sigmoid`. Raises UserError: k is below 1, or above the number of experts in
    the kept groups."""
    _check(top_k, logits[:, : logits.shape[1] // groups * kept_groups])

    def probabilities(logits: Tensor, chosen: Tensor) -> Tensor:
        probs = logits.sigmoid().gather(1, chosen)
        return (probs / (probs.sum(-1, keepdim=True) + SMALLEST_SUM) if renormalize else probs) * factor

    constants = {"TOP_K": top_k, "RENORMALIZE": renormalize, "FACTOR": factor, "SMALLEST_SUM": SMALLEST_SUM}
    constants |= {"GROUPS": groups, "KEPT": kept_groups}
    return _Route.apply(logits, (bias.contiguous(),), _route_sigmoid_kernel, constants, given, ids, probabilities)


class _Route(torch.autograd.Function):
    """Launches a kernel of this file. probabilities: its definition at given experts, which has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        more: tuple[Tensor, ...],
        kernel: Any,
        constants: dict[str, Any],
        given: Tensor | None,
        ids: torch.dtype,
        probabilities: Callable[[Tensor, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        (tokens, experts), logits = logits.shape, logits.contiguous()
        # A kernel that chooses writes all k experts of a token; given experts may occur twice in a token.
        allocate = torch.empty if given is None else torch.zeros
        probs = allocate(tokens, constants["TOP_K"], dtype=torch.float32, device=logits.device)
        chosen = torch.empty_like(probs, dtype=ids) if given is None else given.sort(-1).values.to(ids).contiguous()
        kernel[-(-tokens // _TOKENS),](
            *(logits, *more, probs, chosen, tokens, experts),
            GIVEN=given is not None,
            TOKENS=_TOKENS,
            EXPERTS=triton.next_power_of_2(experts),
            **constants,
            num_warps=4,
            enable_fp_fusion=False,
        )
        ctx.save_for_backward(logits, chosen)
        ctx.probabilities = probabilities
        ctx.mark_non_differentiable(chosen)
        ctx.set_materialize_grads(False)  # of the experts, zeros
        return probs, chosen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, chosen = ctx.saved_tensors
        logits = logits.detach().requires_grad_()
        with torch.enable_grad():
            probs = ctx.probabilities(logits.float(), chosen.long())
        return torch.autograd.grad(probs, logits, grads[0])[0], *[None] * 6


def _check(top_k: int, x: Tensor) -> None:
    if not 1 <= top_k <= x.shape[1]:
        raise user_error("top_k", top_k, f"1 to {x.shape[1]}, the experts", "Check the model's config.")


@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    logits_ptr, probs_ptr, chosen_ptr, tokens, experts,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, GIVEN: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    token, expert = _tile(TOKENS, EXPERTS)
    first = token * TOP_K
    real = token < tokens
    probs = _softmax(logits_ptr, token, expert, tokens, experts, EXPERTS)
    order = _order(probs, expert, experts)
    chosen = _choose(order, chosen_ptr + first, real, expert, experts, TOP_K, GIVEN)
    if RENORMALIZE:
        probs = tl.div_rn(probs, pairwise_sum(tl.where(chosen, probs, 0.0), EXPERTS)[:, None])
    _store(probs, chosen, probs_ptr + first, chosen_ptr + first, real, expert, GIVEN)


@triton.jit(do_not_specialize=["tokens"])
def _route_sigmoid_kernel(
    logits_ptr, bias_ptr, probs_ptr, chosen_ptr, tokens, experts,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, FACTOR: tl.constexpr, GIVEN: tl.constexpr,
    SMALLEST_SUM: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    token, expert = _tile(TOKENS, EXPERTS)
    first = token * TOP_K
    real = token < tokens
    probs = _sigmoid(logits_ptr, token, expert, tokens, experts)
    order = _kept(probs, bias_ptr, expert, experts, GROUPS, KEPT)
    chosen = _choose(order, chosen_ptr + first, real, expert, experts, TOP_K, GIVEN)
    if RENORMALIZE:
        total = pairwise_sum(tl.where(chosen, probs, 0.0), EXPERTS)[:, None] + SMALLEST_SUM
        probs = tl.div_rn(probs, total + tl.zeros(probs.shape, tl.float32))
    _store(probs * FACTOR, chosen, probs_ptr + first, chosen_ptr + first, real, expert, GIVEN)


@triton.jit
def _tile(TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    return token, tl.arange(0, EXPERTS)[None, :]


@triton.jit
def _softmax(logits_ptr, token, expert, tokens, experts, EXPERTS: tl.constexpr):
    """FP32 [TOKENS, EXPERTS], 0 behind the last expert."""
    row = tl.minimum(token, tokens - 1)
    logits = tl.load(logits_ptr + row * experts + expert, mask=expert < experts, other=float("-inf")).to(tl.float32)
    weights = tl.exp(logits - tl.max(logits, 1)[:, None])
    return tl.div_rn(weights, pairwise_sum(weights, EXPERTS)[:, None] + tl.zeros(weights.shape, tl.float32))


@triton.jit
def _sigmoid(logits_ptr, token, expert, tokens, experts):
    """FP32 [TOKENS, EXPERTS], 0 behind the last expert."""
    row = tl.minimum(token, tokens - 1)
    logits = tl.load(logits_ptr + row * experts + expert, mask=expert < experts, other=float("-inf")).to(tl.float32)
    return tl.div_rn(tl.full(logits.shape, 1.0, tl.float32), 1.0 + tl.exp(-logits))


@triton.jit
def _kept(probs, bias_ptr, expert, experts, GROUPS: tl.constexpr, KEPT: tl.constexpr):
    """Return experts' scores: sigmoid + bias, -inf outside the KEPT groups whose best pairs have the largest sums."""
    order = _order(probs + tl.load(bias_ptr + expert, mask=expert < experts, other=0.0), expert, experts)
    if KEPT < GROUPS:
        size = experts // GROUPS
        group = expert // size
        scores = tl.full(order.shape, float("-inf"), tl.float32)
        for index in range(GROUPS):
            own = tl.where(group == index, order, float("-inf"))
            best, rest = _take_best(own, expert, experts)
            score = tl.max(own, 1, keep_dims=True) + tl.max(rest, 1, keep_dims=True)
            scores = tl.where(group == index, score, scores)
        kept = tl.zeros(order.shape, tl.int1)
        for _ in range(KEPT):
            best, _rest = _take_best(scores, expert, experts)
            kept = kept | (group == best // size)
            scores = tl.where(kept, float("-inf"), scores)
        order = tl.where(kept, order, float("-inf"))
    return order


@triton.jit
def _choose(order, chosen_ptr, real, expert, experts, TOP_K: tl.constexpr, GIVEN: tl.constexpr):
    """Return the experts of each token, bool [TOKENS, EXPERTS]: the given experts, or the first TOP_K in order."""
    chosen = tl.zeros(order.shape, tl.int1)
    for index in range(TOP_K):
        if GIVEN:
            best = tl.load(chosen_ptr + index, mask=real, other=0).to(tl.int32)
        else:
            best, order = _take_best(order, expert, experts)
        chosen = chosen | (expert == best)
    return chosen


@triton.jit
def _store(probs, chosen, probs_ptr, chosen_ptr, real, expert, GIVEN: tl.constexpr):
    """Store the probabilities of the chosen experts, and the experts unless they were given, in ascending order."""
    rank = tl.cumsum(chosen.to(tl.int32), 1) - 1
    tl.store(probs_ptr + rank, probs, mask=chosen & real)
    if not GIVEN:
        tl.store(chosen_ptr + rank, expert.to(chosen_ptr.dtype.element_ty), mask=chosen & real)


@triton.jit
def _order(probs, expert, experts):
    """Return the scores that rank experts. NaN comes first, as in torch; places after the last expert come last."""
    return tl.where(expert < experts, tl.where(probs == probs, probs, float("inf")), float("-inf"))


@triton.jit
def _take_best(order, expert, experts):
    """Return the first expert with the highest score [TOKENS, 1], and the scores without this expert."""
    highest = tl.max(order, 1, keep_dims=True)
    best = tl.min(tl.where(order == highest, expert, experts), 1, keep_dims=True)
    return best, tl.where(expert == best, float("-inf"), order)
