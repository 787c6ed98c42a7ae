"""MLPs in native mode: Megatron's dense MLP with the norm before it, and its routed experts and router.

The outputs of a token's experts are added in one defined order. On a GPU, Megatron's own two functions add them with
atomics (moe_utils.py:375 in the backward pass, :441 in the forward pass). With atomics, a resumed run would not end
with the same bits as a run without a break.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics.ops.experts import kept_scores, rows_of_pairs, sum_in_order
from fp8rl.numerics.ops.grouped import grouped_linear
from fp8rl.trainer.modules.exact import StackedWeights
from fp8rl.trainer.modules.native import Fields, Layer, MegatronFamily, own_product, with_precision
from fp8rl.trainer.modules.precision import LayerPrecision
from fp8rl.trainer.modules.weights import empty_weight

GATE, DOWN = "experts.gate_proj", "experts.down_proj"


class WeightedExperts(TEGroupedMLP):
    """Megatron's grouped experts. They multiply the output by the router's probabilities, as engines do.

    Megatron itself multiplies the input of fc2, whose quantized values would contain the probabilities.
    """

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[T, H] sorted by expert, probabilities [T] -> ([T, H], no bias). Rounds once more after the probabilities."""
        ones = torch.ones_like(permuted_probs)
        output, bias = super().forward(permuted_local_hidden_states, tokens_per_expert, ones)
        return (output * permuted_probs.unsqueeze(-1)).to(output.dtype), bias


class GroupedLinear(StackedWeights):
    """Replaces TransformerEngine's GroupedLinear: one product for each expert of this rank, in FP8 if the spec says."""

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
        """x [T, K] sorted by expert -> ([T, N], no bias). m_splits: the number of rows of each expert."""
        p, weights = self.precision, self.weight
        if not p.quantizes(self.kind):
            own = own_product(p, self.kind, x.device) or F.linear
            products = [own(rows, weight) for rows, weight in zip(x.split(m_splits), weights, strict=True)]
            return torch.cat(products), None
        counts = torch.tensor(m_splits, device=x.device)
        return grouped_linear(x, counts, weights, p.operand(weights), p.spec, p.backward), None


def _experts(layer: Layer) -> Fields:
    """Return the fields of a layer with a router, routed experts and, if the model has them, shared experts. Megatron's
    router is used if it computes the model's probabilities."""
    sizes, modules, kind, shared = layer.definition.sizes, layer.modules, TopKRouter, None
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


def _dense(layer: Layer) -> Fields:
    modules, width = layer.modules, {"ffn_hidden_size": layer.definition.sizes.ffn_size}
    submodules = MLPSubmodules(
        linear_fc1=modules.norm_column_linear("gate_proj"), linear_fc2=modules.row_linear("down_proj")
    )
    return {"mlp": ModuleSpec(module=MLP, params=width, submodules=submodules)}


FAMILIES = {"mlp": MegatronFamily(layer=_dense), "experts": MegatronFamily(layer=_experts, config=_config)}


# The router, where Megatron's would choose or weigh experts otherwise than the model.


class OneExpertRouter(TopKRouter):
    """A router that chooses one expert per token and renormalises. As in the engine, the expert's probability is
    always 1, or the factor of a sigmoid router.

    With one expert per token, Megatron requires a softmax over all experts (`moe_router_pre_softmax`), and renormalises
    neither this softmax nor the sigmoid of a sigmoid router.
    """

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [S, B, E] -> probabilities [S * B, E], 0 if not chosen, and bool [S * B, E], True if chosen."""
        probs, routing_map = super().routing(logits, padding_mask)
        factor = self.config.moe_router_topk_scaling_factor or 1.0
        return probs * 0 + routing_map.to(probs.dtype) * factor, routing_map  # its weight keeps a gradient, of zeros


class UnnormalizedRouter(TopKRouter):
    """A sigmoid router whose probabilities are not divided by their sum. Megatron always divides if k > 1."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [S, B, E] -> probabilities [S * B, E], 0 if not chosen, and bool [S * B, E], True if chosen."""
        _, routing_map = super().routing(logits, padding_mask)
        probs = logits.view(routing_map.shape).float().sigmoid() * self.config.moe_router_topk_scaling_factor
        return probs.to(logits.dtype) * routing_map, routing_map


def best_of_groups(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """Replace Megatron's `group_limited_topk`: scores [T, E] -> scores [T, k] and ids [T, k] of the chosen experts."""
    return kept_scores(scores, num_groups, group_topk).topk(topk, dim=-1)


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Copy each token once for each of its k experts. Replaces Megatron's `permute`.

    tokens [T, H], routing_map bool [T, experts] -> rows [T * k, H] sorted by expert and then token, their
    probabilities, and the token of each row. A token's gradient is the sum of its rows' gradients as in `unpermute`.
    """
    if fused or drop_and_pad:  # TransformerEngine's kernel gathers; nothing here drops tokens
        return moe_utils.permute(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)  # type: ignore[no-any-return]
    _, chosen, token_of_row = moe_utils.permute(tokens.detach()[:, :0], routing_map, probs)
    order = token_of_row.argsort(stable=True).argsort()
    return rows_of_pairs(tokens, order, len(order) // len(tokens)), chosen, token_of_row


def unpermute(
    rows: Tensor,
    token_of_row: Tensor,
    restore_shape: torch.Size,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> Tensor:
    """Sum each token's rows in FP32, in ascending expert id, and round once: [T * k, H] -> [T, H]. Replaces Megatron's
    `unpermute`."""
    if fused or drop_and_pad or probs is not None:
        return moe_utils.unpermute(rows, token_of_row, restore_shape, probs, routing_map, fused, drop_and_pad)  # type: ignore[no-any-return]
    return _Unpermute.apply(rows, token_of_row, restore_shape[0])


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(token_of_row)
        choices = rows[token_of_row.argsort(stable=True)].float().view(tokens, -1, rows.shape[1])
        return sum_in_order(choices).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None
