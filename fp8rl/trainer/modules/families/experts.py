"""Routed experts in Megatron: their grouped products, and the sum of a token's expert outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor, nn

from fp8rl.models.families.mlp import EXPERTS, EXPERTS_AND_SHARED, ROUTER, SHARED_GATE, SIGMOID_TOPK, TOPK
from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics import ops
from fp8rl.numerics.config import Mode
from fp8rl.numerics.ops import ExpertWeights
from fp8rl.numerics.ops.experts import adapted_grouped_linear
from fp8rl.numerics.ops.grouped import grouped_linear
from fp8rl.trainer.modules.families import (
    Call,
    Fields,
    Layer,
    MegatronFamily,
    MegatronSide,
    mlp,
    output,
    product,
    with_precision,
)
from fp8rl.trainer.modules.precision import LayerPrecision
from fp8rl.trainer.modules.router import (
    BiasedRouter,
    OneExpertRouter,
    Router,
    UnnormalizedRouter,
    on_their_ranks,
    rows_of_pairs,
)
from fp8rl.trainer.modules.weights import GroupedWeights, StackedWeights

GATE, DOWN = "experts.gate_proj", "experts.down_proj"


class Experts(TEGroupedMLP):
    """`ops.experts` on this rank's experts, with the structure and checkpoints of Megatron's grouped MLP."""

    def __init__(self, *args: Any, precision: LayerPrecision, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision = precision

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, None]:
        """x [T, H] sorted by expert, counts int64 [experts of this rank] -> ([T, H], no bias)"""
        p = self.precision
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
        """Compute one of the two products of `ops.experts`, and let its gradient reach a merged adapter."""
        out = adapted_grouped_linear(x, counts, w, self.precision.spec, self.precision.backward)
        adapter = self.precision.used(linear.adapter)
        return out if adapter is None else adapter.with_adapter_gradient(out, x, counts)


class MoE(MoELayer):
    """A layer's experts as an engine runs them: pairs sorted by expert, `ops.experts`, `ops.combine`.

    Expert outputs are sent back unweighted, in the model's dtype. The rank that owns a token multiplies them by the
    router's probabilities, sums in FP32 in ascending expert order, and rounds once.
    """

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """[S, B, H] -> ([S, B, H], no bias)"""
        if self.moe_layer_recompute:
            return checkpoint(self._forward, False, hidden_states), None
        return self._forward(hidden_states), None

    def _forward(self, x: Tensor) -> Tensor:
        """Add shared experts' output to the rounded sum of the routed ones, and round again."""
        shared, top_k = self.shared_experts_compute(x), self.config.moe_router_topk
        probs, chosen = self.router(x)
        order, counts = ops.group_by_expert(chosen, self.config.num_moe_experts)
        rows = rows_of_pairs(x.flatten(0, -2), order, top_k)
        if self.ep_group.size() == 1:
            outputs = self.experts(rows, counts)[0]
        else:
            outputs = on_their_ranks(lambda *here: self.experts(*here)[0], rows, counts, self.ep_group)
        routed = ops.combine(outputs, probs, order, x.dtype).view_as(x)
        return routed if shared is None else routed + shared


class GatedSharedExpert(SharedExpertMLP):
    """Megatron's shared expert, its output gated by `ops.token_gate`."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[S, B, H] -> the same shape. S: this tensor-parallel rank's part of the sequence."""
        output, _ = MLP.forward(self, hidden_states)
        return ops.token_gate(output, hidden_states, self.gate_weight)


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


class GroupedLinear(GroupedWeights):
    """One product per expert of this rank, in FP8 if the spec says so: replaces TransformerEngine's GroupedLinear."""

    def __init__(self, *args: Any, precision: LayerPrecision, kind: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision, self.kind = precision, kind

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        """[T, K] sorted by expert, m_splits rows each -> ([T, N], no bias)"""
        p, weights = self.precision, self.weights()
        if not p.quantizes(self.kind):
            products = [F.linear(rows, weight) for rows, weight in zip(x.split(m_splits), weights, strict=True)]
            return torch.cat(products), None
        counts = torch.tensor(m_splits, device=x.device)
        return grouped_linear(x, counts, weights, p.group_operand(weights), p.spec, p.backward), None


def _fields(
    layer: Layer,
    router: ModuleSpec,
    experts: ModuleSpec,
    moe: type[MoELayer] = MoELayer,
    gated: type[SharedExpertMLP] = SharedExpertMLP,
) -> Fields:
    """Return the fields of a layer with a norm, routed experts and, if the model has them, shared experts. gated: the
    class of shared experts whose output a gate multiplies."""
    modules, shared = layer.modules, None
    if layer.sizes.shared_size:
        of_shared = MLPSubmodules(
            linear_fc1=modules.column_linear("gate_proj"),
            linear_fc2=modules.row_linear("down_proj"),
            activation_func=modules.activation,
        )
        shared = ModuleSpec(module=gated if layer.sizes.shared_gate else SharedExpertMLP, submodules=of_shared)
    submodules = MoESubmodules(router=router, experts=experts, shared_experts=shared)
    return {"pre_mlp_layernorm": modules.norm, "mlp": ModuleSpec(module=moe, submodules=submodules)}


def _exact(layer: Layer) -> Fields:
    sizes = layer.sizes
    router = ModuleSpec(module=Router, params={"renormalize": sizes.renormalize})
    if sizes.sigmoid_router is not None:
        params = {"renormalize": sizes.renormalize, "chooses": sizes.sigmoid_router}
        router = ModuleSpec(module=BiasedRouter, params=params)
    experts = ModuleSpec(
        module=Experts,
        params={"precision": layer.precision},
        submodules=MLPSubmodules(linear_fc1=StackedWeights, linear_fc2=StackedWeights),
    )
    return _fields(layer, router, experts, MoE, GatedSharedExpert)


def _native(layer: Layer, products: MLPSubmodules) -> Fields:
    """Return the fields with Megatron's router, or with ours if Megatron's probabilities are not the model's."""
    sizes, kind = layer.sizes, TopKRouter
    if sizes.renormalize and sizes.top_k == 1:
        kind = OneExpertRouter
    elif not sizes.renormalize and sizes.sigmoid_router is not None:
        kind = UnnormalizedRouter
    router = ModuleSpec(module=kind)
    return _fields(layer, router, ModuleSpec(module=WeightedExperts, submodules=products))


def _megatron(layer: Layer) -> Fields:
    grouped = with_precision(layer.precision, GroupedLinear)
    return _native(layer, MLPSubmodules(linear_fc1=grouped(GATE), linear_fc2=grouped(DOWN)))


def _transformer_engine(layer: Layer) -> Fields:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # needs TransformerEngine

    grouped = TESpecProvider().grouped_mlp_modules(moe_use_grouped_gemm=True, moe_use_legacy_grouped_gemm=False)
    return _native(layer, grouped[1])


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


def _own_formats(sizes: ModelSizes, mode: Mode) -> Mapping[str, str]:
    """Return a sigmoid router's formats. It computes in FP32, but exact mode multiplies BF16 operands as BF16."""
    if sizes.sigmoid_router is None:
        return {}
    in_fp32 = dict.fromkeys(("router.logits", "router.probabilities", "router.gradient"), "fp32")
    return in_fp32 | {"router.operands": "bf16|fp32"}


def _topk(call: Call) -> tuple[Tensor, ...]:
    """Read probabilities and experts from the output of our router (experts of tokens) or Megatron's (bool map)."""
    probs, routing_map = call[2]
    if routing_map.dtype != torch.bool:
        dense = probs.new_zeros(len(probs), call[0].config.num_moe_experts)
        return dense.scatter(1, routing_map, probs), routing_map
    chosen = routing_map.nonzero()[:, 1].view(len(routing_map), -1)  # ascending expert id
    return probs.float(), chosen


def _each_expert(layer: nn.Module, probs: Tensor, chosen: Tensor, rows: Tensor) -> Tensor:
    routing = torch.zeros_like(probs, dtype=torch.bool).scatter(1, chosen, True)
    expert_of_row, token_of_row = routing.t().nonzero().unbind(1)
    if isinstance(layer, MoE):  # weighted where they are added, elsewhere inside the experts
        rows = (rows.float() * probs[token_of_row, expert_of_row, None]).to(rows.dtype)
    return rows[token_of_row.argsort(stable=True)].view(*chosen.shape, -1)


FAMILY = MegatronFamily(
    sides={
        **mlp.FAMILY.sides,  # of shared experts
        ROUTER: MegatronSide(product),
        TOPK: MegatronSide(_topk),
        SIGMOID_TOPK: MegatronSide(_topk),
        SHARED_GATE: MegatronSide(output),
        EXPERTS: MegatronSide(output, each=_each_expert),
        EXPERTS_AND_SHARED: MegatronSide(output, each=_each_expert),
    },
    layer={"exact": _exact, "megatron": _megatron, "transformer_engine": _transformer_engine},
    config=_config,
    own_formats=_own_formats,
)
