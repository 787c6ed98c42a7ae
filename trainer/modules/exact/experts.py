"""Routed experts: their grouped products, and the combination of a token's experts."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.ops import ExpertWeights
from fp8rl.numerics.ops.experts import adapted_grouped_linear
from fp8rl.trainer.modules.permutation import pair_of_row
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
