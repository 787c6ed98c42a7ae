"""Routed experts: their grouped products, and the combination of a token's experts."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from numerics import ops
from numerics.ops import ExpertWeights
from trainer.modules.permutation import pair_of_row
from trainer.modules.precision import LayerPrecision
from trainer.modules.weights import StackedWeights


class Experts(TEGroupedMLP):
    """`ops.experts` on this rank's experts, with the structure and checkpoints of Megatron's grouped MLP."""

    def __init__(self, *args: Any, precision: LayerPrecision, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision = precision

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[T, H] sorted by expert -> ([T, H], no bias). The probabilities are applied where tokens are combined."""
        out = ops.experts(
            permuted_local_hidden_states,
            tokens_per_expert.to(permuted_local_hidden_states.device),  # Megatron moved them to the host
            self._weights(self.linear_fc1, "experts.gate_proj"),
            self._weights(self.linear_fc2, "experts.down_proj"),
            self.precision.spec,
            self.precision.backward,
        )
        return out, None

    def _weights(self, linear: StackedWeights, kind: str) -> ExpertWeights:
        stack, precision = linear.weight, self.precision
        return ExpertWeights(stack, precision.group_operand(stack) if precision.quantizes(kind) else None)


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
