"""Which module stands where in a layer when every op but the FP8 products is Megatron's own."""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter

from fp8rl.models.sizes import ModelSizes
from fp8rl.trainer.modules.latent import LatentAttention
from fp8rl.trainer.modules.layer import LatentModules, LayerModules, asking
from fp8rl.trainer.modules.native.experts import Experts, GroupedLinear
from fp8rl.trainer.modules.native.latent import LatentCore
from fp8rl.trainer.modules.native.linear import ColumnLinear, NormColumnLinear, RowLinear
from fp8rl.trainer.modules.native.norm import RMSNorm
from fp8rl.trainer.modules.native.router import OneExpertRouter
from fp8rl.trainer.modules.precision import LayerPrecision


def layer_modules(sizes: ModelSizes, precision: LayerPrecision) -> LayerModules:
    """The modules of a layer; the model is built with Megatron's rotary embedding."""
    grouped = asking(precision, GroupedLinear)
    experts = MLPSubmodules(linear_fc1=grouped("experts.gate_proj"), linear_fc2=grouped("experts.down_proj"))
    return LayerModules(
        norm=RMSNorm,
        norm_column_linear=asking(precision, NormColumnLinear),
        column_linear=asking(precision, ColumnLinear),
        row_linear=asking(precision, RowLinear),
        core_attention=DotProductAttention,
        activation=None,
        router=router(sizes),
        experts=ModuleSpec(module=Experts, submodules=experts),
        moe=MoELayer,
        latent=LatentModules(
            attention=ModuleSpec(module=LatentAttention, params={"precision": precision}),
            narrow=ColumnParallelLinear,
            core=LatentCore,
        ),
    )


def router(sizes: ModelSizes) -> ModuleSpec:
    """Megatron's own, or where it would not give the chosen experts probabilities that sum to one, ours."""
    return ModuleSpec(module=OneExpertRouter if sizes.top_k == 1 and sizes.renormalize else TopKRouter)
