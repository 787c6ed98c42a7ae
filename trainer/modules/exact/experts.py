"""Routed experts: their grouped products, and the combination of a token's experts."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.ops import ExpertWeights
from fp8rl.numerics.ops.experts import adapted_grouped_linear, sum_in_order
from fp8rl.trainer.modules.precision import LayerPrecision
from fp8rl.trainer.modules.weights import StackedWeights

GATE, DOWN = "experts.gate_proj", "experts.down_proj"


class Experts(TEGroupedMLP):
    """`ops.experts` on this rank's experts, with the structure and checkpoints of Megatron's grouped MLP."""

    def __init__(self, *args: Any, precision: LayerPrecision, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision = precision

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[T, H] sorted by expert -> ([T, H], no bias). The probabilities are applied where tokens are combined."""
        x, p = permuted_local_hidden_states, self.precision
        counts = tokens_per_expert.to(x.device)  # Megatron moved them to the host
        w13, w2 = self._weights(self.linear_fc1, GATE), self._weights(self.linear_fc2, DOWN)
        if not any(self._merges(linear) for linear in (self.linear_fc1, self.linear_fc2)):
            return ops.experts(x, counts, w13, w2, p.spec, p.backward), None
        hidden = ops.swiglu(self._product(x, counts, self.linear_fc1, w13))
        return self._product(hidden, counts, self.linear_fc2, w2), None

    def _weights(self, linear: StackedWeights, kind: str) -> ExpertWeights:
        stack, p = linear.weight, self.precision
        adapter = p.used(linear.adapter)
        low_rank = None if adapter is None or adapter.merges else adapter.low_rank
        if not p.quantizes(kind):
            return ExpertWeights(p.plain(stack), None, low_rank)
        return ExpertWeights(stack, p.group_operand(stack), low_rank)

    def _merges(self, linear: StackedWeights) -> bool:
        adapter = self.precision.used(linear.adapter)
        return adapter is not None and adapter.merges

    def _product(self, x: Tensor, counts: Tensor, linear: StackedWeights, w: ExpertWeights) -> Tensor:
        """One of the two products of `ops.experts`, whose gradient reaches an adapter that is merged."""
        out = adapted_grouped_linear(x, counts, w, self.precision.spec, self.precision.backward)
        adapter = self.precision.used(linear.adapter)
        return out if adapter is None else adapter.reached(out, x, counts)


class MoE(MoELayer):
    """Megatron's MoE layer, ending in `ops.combine`.

    Expert outputs travel back unweighted in the model's dtype. The rank that owns the tokens multiplies by the router's
    probabilities and adds in FP32, in ascending expert order, and rounds once.
    """

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Expert outputs [T * k, H], sorted by expert and then token -> [S, B, H]; what shared experts put out is added
        to their rounded sum, and rounded again."""
        dispatcher = self.token_dispatcher
        order = pair_of_row(dispatcher.reversed_local_input_permutation_mapping)
        top_k = self.config.moe_router_topk
        probs = dispatcher.probs.masked_select(dispatcher.routing_map).view(-1, top_k)
        routed = ops.combine(output, probs, order, output.dtype).view(dispatcher.hidden_shape)
        return routed if shared_expert_output is None else routed + shared_expert_output


# Tokens on their way to their experts and back, with each token's rows added in one defined order.
#
# On a GPU, Megatron's own two add them with atomics (moe_utils.py:375 in the backward pass, :441 in the forward
# pass), so that a run that is resumed would not end in the bits of one that was not.


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


def pair_of_row(token_of_row: Tensor) -> Tensor:
    """The (token, choice) pair of each row, int64 [T * k], choices in ascending expert id."""
    rows = by_token(token_of_row)
    pairs = torch.empty_like(rows)
    pairs[rows] = torch.arange(rows.numel(), device=rows.device)
    return pairs


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
