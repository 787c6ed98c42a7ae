"""Routed experts: grouped weights, their products, and the combination of a token's experts."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from numerics import ops
from numerics.ops import ExpertWeight
from trainer.modules.linear import tag_split
from trainer.modules.precision import Precision


class GroupedWeights(nn.Module):
    """The weights of this rank's experts as `weight0`, `weight1`, … [N, K], TransformerEngine's GroupedLinear names.

    The experts are not split over tensor-parallel ranks (expert_tensor_parallel_size is 1).
    """

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self._groups = pg_collection
        for index in range(num_gemms):
            weight = nn.Parameter(
                torch.empty(output_size, input_size, dtype=config.params_dtype, device=torch.cuda.current_device())
            )
            # Megatron leaves untagged parameters of tensor-parallel ranks above 0 out of the gradient norm, but each
            # rank's optimizer holds another part of the experts.
            tag_split(weight, 0)
            setattr(weight, "whole_expert", True)  # noqa: B010
            setattr(self, f"weight{index}", weight)

    def weights(self) -> list[nn.Parameter]:
        return [getattr(self, f"weight{index}") for index in range(self.num_gemms)]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """All experts of a layer under one key, this rank's at their global indices."""
        metadata = metadata or {}
        groups = self._groups
        total, first = groups.ep.size() * self.num_gemms, groups.ep.rank() * self.num_gemms
        sharded: ShardedStateDict = {}
        for index, weight in enumerate(self.weights()):
            key = f"{index}.weight"
            offsets = (*sharded_offsets, (len(sharded_offsets), first + index, total))
            one = make_sharded_tensors_for_checkpoint(
                {key: weight}, "", {}, offsets, tp_group=groups.expt_tp, dp_cp_group=metadata["dp_cp_group"]
            )
            replace_prefix_for_sharding(one, f"{index}.", prefix)
            tensor = one[key]
            tensor.replica_id = (*tensor.replica_id[:2], groups.expt_dp.rank())
            sharded[f"{prefix}weight{index}"] = tensor
        return sharded


class Experts(TEGroupedMLP):
    """`ops.experts` on this rank's experts, with the structure and checkpoints of Megatron's grouped MLP."""

    def __init__(self, *args: Any, precision: Precision, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision = precision
        self.quantized_up = precision.spec.quantizes("experts.gate_proj")
        self.quantized_down = precision.spec.quantizes("experts.down_proj")

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[T, H] sorted by expert -> ([T, H], no bias). The probabilities are applied where tokens are combined."""
        out = ops.experts(
            permuted_local_hidden_states,
            tokens_per_expert.tolist(),
            self._weights(self.linear_fc1, self.quantized_up),
            self._weights(self.linear_fc2, self.quantized_down),
            self.precision.spec,
            self.precision.backward,
        )
        return out, None

    def _weights(self, linear: GroupedWeights, quantized: bool) -> list[ExpertWeight]:
        if not quantized:
            return [ExpertWeight(weight) for weight in linear.weights()]
        cache, spec = self.precision.cache, self.precision.spec.weight
        return [ExpertWeight(weight, cache.dequantized(weight, spec)) for weight in linear.weights()]


class MoE(MoELayer):
    """Megatron's MoE layer, ending in `ops.combine`.

    Expert outputs travel back unweighted in the model's dtype. The rank that owns the tokens multiplies by the router's
    probabilities and adds in FP32, in ascending expert order, and rounds once.
    """

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Expert outputs [T * k, H], sorted by expert and then token -> [S, B, H]"""
        dispatcher = self.token_dispatcher
        token_of_row = dispatcher.reversed_local_input_permutation_mapping
        # Rows stand in ascending expert order, so a stable sort by token lists each token's experts in that order.
        by_token = token_of_row.argsort(stable=True)
        order = torch.empty_like(by_token)
        order[by_token] = torch.arange(by_token.numel(), device=by_token.device)
        top_k = self.config.moe_router_topk
        probs = dispatcher.probs.masked_select(dispatcher.routing_map).view(-1, top_k)
        return ops.combine(output, probs, order, output.dtype).view(dispatcher.hidden_shape)
