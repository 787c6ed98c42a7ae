"""The choice of experts: `numerics.ops.router`, softmax, top-k and renormalisation in one kernel.

A program holds a few tokens and all of their experts. Sums over experts are added in pairs, with 0 for those that do
not count, so that probabilities depend neither on the logits' dtype nor on who chose the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from numerics.errors import user_error
from numerics.kernels.arithmetic import pairwise_sum
from numerics.ops import router as definition

_TOKENS = 4
"""Tokens of a program: one for each of its warps."""


def top_experts(probs: torch.Tensor, top_k: int) -> torch.Tensor:
    """probs [T, E] -> the k most probable experts int64 [T, k]; of equally probable ones those with the lower id."""
    probs = probs.contiguous()
    chosen = torch.empty(len(probs), top_k, dtype=torch.int64, device=probs.device)
    _launch(_top_kernel, probs, chosen, TOP_K=_checked(top_k, probs))
    return chosen


def route(
    logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    choose: Callable[[torch.Tensor, int], torch.Tensor] = definition.top_experts,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] -> probabilities FP32 [T, k] and experts int64 [T, k], ascending, as `numerics.ops.router.route`.

    Another `choose` than the default is given the probabilities; the k different experts that it chooses get the same
    bits as if the kernel had chosen them.

    Raises:
        UserError: k is not from 1 to E.
    """
    logits, given = logits.contiguous(), None
    _checked(top_k, logits)
    if choose is not definition.top_experts:
        probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        _launch(_softmax_kernel, logits.detach(), probs)
        given = choose(probs, top_k).sort(-1).values.contiguous()
    return _Route.apply(logits, top_k, renormalize, given)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, top_k: int, renormalize: bool, given: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probs = torch.zeros(len(logits), top_k, dtype=torch.float32, device=logits.device)
        chosen = torch.empty(probs.shape, dtype=torch.int64, device=logits.device) if given is None else given
        _launch(_route_kernel, logits, probs, chosen, TOP_K=top_k, RENORMALIZE=renormalize, GIVEN=given is not None)
        ctx.save_for_backward(logits, chosen)
        ctx.renormalize = renormalize
        ctx.mark_non_differentiable(chosen)
        return probs, chosen

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """That of the definition, at the experts of the forward."""
        logits, chosen = ctx.saved_tensors
        logits = logits.detach().requires_grad_()
        with torch.enable_grad():
            probs = logits.float().softmax(-1).gather(1, chosen)
            probs = probs / probs.sum(-1, keepdim=True) if ctx.renormalize else probs
        return torch.autograd.grad(probs, logits, grads[0])[0], None, None, None


def _checked(top_k: int, x: torch.Tensor) -> int:
    if not 1 <= top_k <= x.shape[1]:
        raise user_error(
            "top_k", found=top_k, expected=f"1 to {x.shape[1]}, the experts", remedy="Check the model's config."
        )
    return top_k


def _launch(kernel: Any, x: torch.Tensor, *outputs: torch.Tensor, **constants: Any) -> None:
    tokens, experts = x.shape
    shape = {"TOKENS": _TOKENS, "EXPERTS": triton.next_power_of_2(experts)}
    grid = (triton.cdiv(tokens, _TOKENS),)
    kernel[grid](x, *outputs, tokens, experts, **constants, **shape, num_warps=4, enable_fp_fusion=False)


@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    logits_ptr, probs_ptr, chosen_ptr, tokens, experts,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, GIVEN: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    token, expert = _tile(TOKENS, EXPERTS)
    first = token * TOP_K
    real = token < tokens
    probs = _softmax(logits_ptr, token, expert, tokens, experts, EXPERTS)
    chosen = tl.zeros((TOKENS, EXPERTS), tl.int1)
    order = _order(probs, expert, experts)
    for index in range(TOP_K):
        if GIVEN:
            best = tl.load(chosen_ptr + first + index, mask=real, other=0).to(tl.int32)
        else:
            best, order = _take_best(order, expert, experts)
        chosen = chosen | (expert == best)
    rank = tl.cumsum(chosen.to(tl.int32), 1) - 1
    if RENORMALIZE:
        probs = tl.div_rn(probs, pairwise_sum(tl.where(chosen, probs, 0.0), EXPERTS)[:, None])
    tl.store(probs_ptr + first + rank, probs, mask=chosen & real)
    if not GIVEN:
        tl.store(chosen_ptr + first + rank, expert.to(tl.int64), mask=chosen & real)


@triton.jit(do_not_specialize=["tokens"])
def _softmax_kernel(logits_ptr, probs_ptr, tokens, experts, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    token, expert = _tile(TOKENS, EXPERTS)
    probs = _softmax(logits_ptr, token, expert, tokens, experts, EXPERTS)
    tl.store(probs_ptr + token * experts + expert, probs, mask=(token < tokens) & (expert < experts))


@triton.jit(do_not_specialize=["tokens"])
def _top_kernel(
    probs_ptr, chosen_ptr, tokens, experts, TOP_K: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr
):
    token, expert = _tile(TOKENS, EXPERTS)
    inside = (token < tokens) & (expert < experts)
    probs = tl.load(probs_ptr + token * experts + expert, mask=inside, other=0.0).to(tl.float32)
    order = _order(probs, expert, experts)
    for index in range(TOP_K):
        best, order = _take_best(order, expert, experts)
        tl.store(chosen_ptr + token * TOP_K + index, best.to(tl.int64), mask=token < tokens)


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
def _order(probs, expert, experts):
    """What experts are ranked by: NaN before everything, as torch sorts it, and no expert's place behind everything."""
    return tl.where(expert < experts, tl.where(probs == probs, probs, 2.0), -1.0)


@triton.jit
def _take_best(order, expert, experts):
    """The first of the highest [TOKENS, 1], and the order without it."""
    highest = tl.max(order, 1, keep_dims=True)
    best = tl.min(tl.where(order == highest, expert, experts), 1, keep_dims=True)
    return best, tl.where(expert == best, -1.0, order)
