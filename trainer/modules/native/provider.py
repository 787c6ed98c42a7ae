"""Which module stands where in a layer when every op but the FP8 products is Megatron's own."""

from __future__ import annotations

from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter

from trainer.modules.layer import LayerModules
from trainer.modules.native.experts import GroupedLinear
from trainer.modules.native.linear import NormColumnLinear, RowLinear
from trainer.modules.native.norm import RMSNorm
from trainer.modules.precision import Precision


def layer_modules(precision: Precision) -> LayerModules:
    """The modules of a layer; the model is built with Megatron's rotary embedding."""
    experts = ModuleSpec(
        module=TEGroupedMLP,
        submodules=MLPSubmodules(
            linear_fc1=ModuleSpec(module=GroupedLinear, params={"precision": precision, "kind": "experts.gate_proj"}),
            linear_fc2=ModuleSpec(module=GroupedLinear, params={"precision": precision, "kind": "experts.down_proj"}),
        ),
    )
    return LayerModules(
        norm=RMSNorm,
        norm_column_linear=NormColumnLinear,
        row_linear=RowLinear,
        core_attention=DotProductAttention,
        activation=None,
        moe=ModuleSpec(module=MoELayer, submodules=MoESubmodules(router=TopKRouter, experts=experts)),
    )
