"""The choice of a token's experts, and the exchange of tokens and expert outputs between ranks.

A token's rows are added in one defined order. On a GPU, Megatron's own two functions add them with atomics
(moe_utils.py:375 in the backward pass, :441 in the forward pass). With them a resumed run would not end in the same
bits as a run without a break.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.ops.experts import kept_scores, sum_in_order

# Tokens on their way to their experts and back, in exact mode.
#
# A rank that has all experts sorts (token, choice) pairs by expert, as an engine does, and never waits for the device.
# Expert-parallel ranks tell each other how many rows they send. These numbers are the sizes of what arrives, so a rank
# waits for them, once in a forward. Megatron's dispatcher waits four times a layer, on one rank too.


def rows_of_pairs(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Copy each token once for each of its experts: x [T, H] -> rows [T * k, H].

    order: int64 [T * k], the number of each row's (token, choice) pair. A token's choices are in ascending expert id.
    A token's gradient is the FP32 sum of its rows' gradients in the order of its choices, rounded once.
    """
    return _Rows.apply(x, order, top_k)  # type: ignore[no-any-return]


def on_their_ranks(
    experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Send rows [T * k, H] to their experts on all ranks, and return the experts' outputs in the order of the rows.

    rows: sorted by expert. counts: int64 [experts], the number of rows of each expert. experts: computes this rank's
    experts. It takes the rows [R, H] that arrived, sorted by expert and then sender, and each expert's number of rows.
    """
    ranks = group.size()
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    arriving = arriving.view(ranks, -1)  # by the rank that sends, and the expert here
    leave, arrive = on_host(torch.stack((counts.view(ranks, -1).sum(1), arriving.sum(1))), len(rows))
    here: Tensor = all_to_all(group, rows, arrive, leave)
    expert = torch.arange(arriving.shape[1], device=rows.device).repeat(ranks)
    order = expert.repeat_interleave(arriving.flatten(), output_size=sum(arrive)).argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    made = experts(_Reordered.apply(here, order, place), arriving.sum(0))
    back: Tensor = all_to_all(group, _Reordered.apply(made, place, order), leave, arrive)
    return back


def on_host(sizes: Tensor, rows: int) -> list[list[int]]:
    """Wait for int64 [2, ranks], the numbers of rows that this rank sends to each rank and receives from each rank.

    rows: the number of rows sent, which the host knows already.
    """
    return sizes.tolist()  # type: ignore[no-any-return]


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
        return ops.combine(grads[0], ones, order, grads[0].dtype), None, None


class _Reordered(torch.autograd.Function):
    """Puts rows in another order, given by a permutation and its inverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None


# Native mode: Megatron's router where it would choose or weigh experts otherwise than the model.


class OneExpertRouter(TopKRouter):
    """A router that renormalises over one expert per token: the probability is 1, or a sigmoid router's factor.

    With one expert, Megatron requires a softmax over all experts (`moe_router_pre_softmax`) and does not renormalise
    the probability. Nor does it renormalise the sigmoid of one expert.
    """

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [S, B, E] -> probabilities [S * B, E], 0 except for the chosen expert, and the bool map of choices."""
        probs, routing_map = super().routing(logits, padding_mask)
        factor = self.config.moe_router_topk_scaling_factor or 1.0
        return probs * 0 + routing_map.to(probs.dtype) * factor, routing_map  # its weight keeps a gradient, of zeros


class UnnormalizedRouter(TopKRouter):
    """A sigmoid router whose probabilities are not divided by their sum. Megatron always divides if k > 1."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [S, B, E] -> probabilities [S * B, E], 0 except for chosen experts, and the bool map of choices."""
        _, routing_map = super().routing(logits, padding_mask)
        probs = logits.view(routing_map.shape).float().sigmoid() * self.config.moe_router_topk_scaling_factor
        return probs.to(logits.dtype) * routing_map, routing_map


def best_of_groups(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """Replace Megatron's `group_limited_topk`: scores [T, E] -> chosen experts' scores and ids, each [T, k]."""
    return kept_scores(scores, num_groups, group_topk).topk(topk, dim=-1)


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Copy each token once for each of its experts. Replaces Megatron's `permute` where each token has k experts.

    tokens [T, H], routing_map bool [T, experts] -> rows [T * k, H] sorted by expert and then token, their
    probabilities, and the token of each row. :func:`sum_by_token` sums the rows' gradients to a token's gradient.
    """
    if fused or drop_and_pad:  # TransformerEngine's kernel gathers; nothing here drops tokens
        return moe_utils.permute(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)  # type: ignore[no-any-return]
    _, chosen, token_of_row = moe_utils.permute(tokens.detach()[:, :0], routing_map, probs)
    return _Permute.apply(tokens, token_of_row), chosen, token_of_row


def unpermute(
    rows: Tensor,
    token_of_row: Tensor,
    restore_shape: torch.Size,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> Tensor:
    """Sum each token's rows by :func:`sum_by_token`: [T * k, H] -> [T, H]. Replaces Megatron's `unpermute`."""
    if fused or drop_and_pad or probs is not None:
        return moe_utils.unpermute(rows, token_of_row, restore_shape, probs, routing_map, fused, drop_and_pad)  # type: ignore[no-any-return]
    return _Unpermute.apply(rows, token_of_row, restore_shape[0])


def sum_by_token(rows: Tensor, token_of_row: Tensor, tokens: int) -> Tensor:
    """Sum the k rows of each token in FP32, in ascending expert id, and round once: [T * k, H] -> [T, H]."""
    choices = rows[by_token(token_of_row)].float().view(tokens, -1, rows.shape[1])
    return sum_in_order(choices).to(rows.dtype)


def by_token(token_of_row: Tensor) -> Tensor:
    """Return the order [T * k] of rows by token and then expert. (Rows ascend by expert, and the sort is stable.)"""
    return token_of_row.argsort(stable=True)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_of_row: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row)
        ctx.tokens = len(tokens)
        return tokens.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (token_of_row,) = ctx.saved_tensors
        return sum_by_token(grads[0], token_of_row, ctx.tokens), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return sum_by_token(rows, token_of_row, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None
