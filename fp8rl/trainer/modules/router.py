"""The choice of a token's experts, and, in native mode, tokens on their way to them and back.

A token's rows are added in one defined order. On a GPU, Megatron's own two functions add them with atomics
(moe_utils.py:375 in the backward pass, :441 in the forward pass), so that a run that is resumed would not end in the
bits of one that was not.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from fp8rl.models.sizes import SigmoidRouter
from fp8rl.numerics import ops
from fp8rl.numerics.ops.experts import kept_scores, sum_in_order


class Router(TopKRouter):
    """Logits by `ops.linear`, top-k by `ops.route`."""

    def __init__(
        self, *, renormalize: bool, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.renormalize = renormalize

    def gating(self, input: Tensor) -> Tensor:
        """[S, B, H] -> logits [S, B, E]"""
        return ops.linear(input, self.weight)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[T, E] -> probabilities and experts [T, k]"""
        return ops.route(logits, self.topk, self.renormalize, self._choose)

    def _choose(self, probs: Tensor, top_k: int) -> Tensor:
        return self.router_replay.get_replay_topk(probs, top_k, default_compute_topk=_top)[1]

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[S, B, H] -> probabilities FP32 and experts int64 [S * B, k], in ascending expert id."""
        return self.routing(self.gating(input).flatten(0, -2))


class BiasedRouter(Router):
    """Logits in FP32, not rounded, and top-k by `ops.route_sigmoid`, with a bias for each expert."""

    def __init__(self, *, chooses: SigmoidRouter, **settings: Any) -> None:
        super().__init__(**settings)
        self.chooses = chooses

    def gating(self, input: Tensor) -> Tensor:
        """[S, B, H] -> logits FP32 [S, B, E]"""
        return ops.linear_partial(input, self.weight)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        how = self.chooses
        return ops.route_sigmoid(
            logits, self.expert_bias, self.topk, how.groups, how.kept_groups, self.renormalize, how.factor, self._choose
        )


def _top(probs: Tensor, top_k: int, *groups: None) -> tuple[Tensor, Tensor]:
    experts = ops.top_experts(probs, top_k)
    return probs.gather(1, experts), experts


# Megatron's router where it would choose or weigh experts otherwise than the model.


class OneExpertRouter(TopKRouter):
    """The router of one expert per token, renormalised: its probability is 1, whatever its logit, as in the engine;
    times the factor of a sigmoid router.

    Megatron insists on a softmax over all experts there (`moe_router_pre_softmax`), and leaves the probability so; and
    it leaves the sigmoid of one expert as it is.
    """

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [S, B, E] -> probabilities [S * B, E], 0 but for the chosen expert, and their bool map."""
        probs, routing_map = super().routing(logits, padding_mask)
        factor = self.config.moe_router_topk_scaling_factor or 1.0
        return probs * 0 + routing_map.to(probs.dtype) * factor, routing_map  # its weight keeps a gradient, of zeros


class UnnormalizedRouter(TopKRouter):
    """The router of sigmoids that are not divided by their sum. Megatron always divides those of several experts."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [S, B, E] -> probabilities [S * B, E], 0 but for the chosen experts, and their bool map."""
        _, routing_map = super().routing(logits, padding_mask)
        probs = logits.view(routing_map.shape).float().sigmoid() * self.config.moe_router_topk_scaling_factor
        return probs.to(logits.dtype) * routing_map, routing_map


def best_of_groups(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """`group_limited_topk`: scores [T, E] -> those of the experts chosen, and the experts, [T, k] each."""
    return kept_scores(scores, num_groups, group_topk).topk(topk, dim=-1)


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """A copy of each token for each of its k experts: Megatron's `permute`, for tokens that all have k experts.

    tokens [T, H], routing_map bool [T, experts] -> rows [T * k, H] sorted by expert and then token, their
    probabilities, and the token of each row. The gradient of a token is the sum of its rows' in :func:`sum_by_token`.
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
    """The sum of each token's rows [T * k, H] -> [T, H], as :func:`sum_by_token`: Megatron's `unpermute`."""
    if fused or drop_and_pad or probs is not None:
        return moe_utils.unpermute(rows, token_of_row, restore_shape, probs, routing_map, fused, drop_and_pad)  # type: ignore[no-any-return]
    return _Unpermute.apply(rows, token_of_row, restore_shape[0])


def sum_by_token(rows: Tensor, token_of_row: Tensor, tokens: int) -> Tensor:
    """The sum of the k rows of each token, in ascending expert id, in FP32, rounded once: [T * k, H] -> [T, H]."""
    choices = rows[by_token(token_of_row)].float().view(tokens, -1, rows.shape[1])
    return sum_in_order(choices).to(rows.dtype)


def by_token(token_of_row: Tensor) -> Tensor:
    """The rows [T * k] sorted by token and then expert: rows ascend by expert, and the sort is stable."""
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
