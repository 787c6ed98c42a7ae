"""Modules of a layer when they are TransformerEngine's, as Megatron wraps them.

The FP8 context that Megatron opens around each layer decides what is quantized, by the model's config.
"""

from __future__ import annotations

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from fp8rl.models.sizes import ModelSizes
from fp8rl.trainer.modules.layer import LatentModules, LayerModules
from fp8rl.trainer.modules.native.provider import Experts, router
from fp8rl.trainer.modules.precision import LayerPrecision


def layer_modules(sizes: ModelSizes, precision: LayerPrecision) -> LayerModules:
    """The modules of a layer; the model is built with Megatron's rotary embedding."""
    provider = TESpecProvider()
    norm_column_linear = ModuleSpec(module=provider.column_parallel_layer_norm_linear())
    column_linear = ModuleSpec(module=provider.column_parallel_linear())
    row_linear = ModuleSpec(module=provider.row_parallel_linear())
    _, experts = provider.grouped_mlp_modules(moe_use_grouped_gemm=True, moe_use_legacy_grouped_gemm=False)
    return LayerModules(
        norm=provider.layer_norm(rms_norm=True),
        norm_column_linear=lambda kind: norm_column_linear,
        column_linear=lambda kind: column_linear,
        row_linear=lambda kind: row_linear,
        core_attention=provider.core_attention(),
        activation=None,
        router=router(sizes),
        experts=ModuleSpec(module=Experts, submodules=experts),
        moe=MoELayer,
        latent=LatentModules(ModuleSpec(module=MLASelfAttention), provider.linear(), provider.core_attention()),
    )
