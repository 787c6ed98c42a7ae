"""Routed experts in Megatron: their grouped products, and the sum of a token's expert outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics.ops.grouped import grouped_linear
from fp8rl.trainer.modules.exact import StackedWeights
from fp8rl.trainer.modules.families import Fields, Layer, MegatronFamily, with_precision
from fp8rl.trainer.modules.precision import LayerPrecision
from fp8rl.trainer.modules.router import OneExpertRouter, UnnormalizedRouter
from fp8rl.trainer.modules.weights import empty_weight

GATE, DOWN = "experts.gate_proj", "experts.down_proj"


class WeightedExperts(TEGroupedMLP):
    """Megatron's grouped experts, with the router's probabilities applied to their output.

    Megatron multiplies before fc2, so that fc2's quantized input would contain the probabilities. Engines do it after.
    """

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[T, H] sorted by expert, probabilities [T] -> ([T, H], no bias), rounded before and after the product"""
        ones = torch.ones_like(permuted_probs)
        output, bias = super().forward(permuted_local_hidden_states, tokens_per_expert, ones)
        return (output * permuted_probs.unsqueeze(-1)).to(output.dtype), bias


class GroupedLinear(StackedWeights):
    """One product per expert of this rank, in FP8 if the spec says so: replaces TransformerEngine's GroupedLinear."""

    computes_adapters = False

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        precision: LayerPrecision,
        kind: str,
        **unused: Any,
    ) -> None:
        super().__init__(config, pg_collection, precision)
        self.kind, self.weight = kind, empty_weight(config, num_gemms, output_size, input_size)

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        """[T, K] sorted by expert, m_splits rows each -> ([T, N], no bias)"""
        p, weights = self.precision, self.weight
        if not p.quantizes(self.kind):
            products = [F.linear(rows, weight) for rows, weight in zip(x.split(m_splits), weights, strict=True)]
            return torch.cat(products), None
        counts = torch.tensor(m_splits, device=x.device)
        return grouped_linear(x, counts, weights, p.operand(weights), p.spec, p.backward), None


def _fields(layer: Layer) -> Fields:
    """Return the fields with Megatron's router, or with ours if Megatron's probabilities are not the model's; with
    routed experts and, if the model has them, shared experts."""
    sizes, modules, kind, shared = layer.sizes, layer.modules, TopKRouter, None
    grouped = with_precision(layer.precision, GroupedLinear)
    products = MLPSubmodules(linear_fc1=grouped(GATE), linear_fc2=grouped(DOWN))
    if modules.provider is not None:
        _, products = modules.provider.grouped_mlp_modules(moe_use_grouped_gemm=True, moe_use_legacy_grouped_gemm=False)
    if sizes.renormalize and sizes.top_k == 1:
        kind = OneExpertRouter
    elif not sizes.renormalize and sizes.sigmoid_router is not None:
        kind = UnnormalizedRouter
    if sizes.shared_size:
        of_shared = MLPSubmodules(
            linear_fc1=modules.column_linear("gate_proj"), linear_fc2=modules.row_linear("down_proj")
        )
        shared = ModuleSpec(module=SharedExpertMLP, submodules=of_shared)
    experts = ModuleSpec(module=WeightedExperts, submodules=products)
    submodules = MoESubmodules(router=ModuleSpec(module=kind), experts=experts, shared_experts=shared)
    return {"pre_mlp_layernorm": modules.norm, "mlp": ModuleSpec(module=MoELayer, submodules=submodules)}


def _config(sizes: ModelSizes) -> Mapping[str, Any]:
    config: dict[str, Any] = {
        "num_moe_experts": sizes.experts,
        "moe_router_topk": sizes.top_k,
        "moe_ffn_hidden_size": sizes.expert_size,
        "moe_grouped_gemm": True,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_score_function": "softmax",
        "moe_enable_routing_replay": True,
        # Probabilities that sum to one are a softmax over the chosen logits; exact mode's router has its own.
        "moe_router_pre_softmax": not sizes.renormalize or sizes.top_k == 1,
    }
    has_experts = [sizes.has_experts(layer) for layer in range(sizes.layers)]
    if not all(has_experts):  # else checkpoints would have a key for each layer, and older ones would not load
        config["moe_layer_freq"] = [int(has) for has in has_experts]
    if sizes.shared_size:
        config["moe_shared_expert_intermediate_size"] = sizes.shared_size
        config["moe_shared_expert_gate"] = sizes.shared_gate
    if (router := sizes.sigmoid_router) is not None:
        config |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": False,
            "moe_router_dtype": "fp32",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_num_groups": router.groups if router.groups > 1 else None,
            "moe_router_group_topk": router.kept_groups if router.groups > 1 else None,
            "moe_router_topk_scaling_factor": router.factor,
        }
    return config


FAMILY = MegatronFamily(layer=_fields, config=_config)
