"""The layer of a Megatron GPTModel, put together from the modules of one numerics mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import nn

from models.sizes import ModelSizes
from trainer.megatron.mapping import MegatronMapping
from trainer.modules.precision import LayerPrecision, Precision


@dataclass(frozen=True)
class LayerModules:
    """What differs between the modes.

    Attributes:
        norm_column_linear, row_linear: for a module kind; see `asking`.
        activation: of a dense MLP; None for the SwiGLU inside Megatron's MLP.
    """

    norm: type[nn.Module]
    norm_column_linear: Callable[[str], ModuleSpec]
    row_linear: Callable[[str], ModuleSpec]
    core_attention: ModuleSpec | type[nn.Module]
    activation: type[nn.Module] | None
    moe: ModuleSpec


def asking(precision: LayerPrecision, module: type[nn.Module]) -> Callable[[str], ModuleSpec]:
    """`module` for any module kind, which takes `precision` and its `kind` as keywords and asks whether to quantize."""
    return lambda kind: ModuleSpec(module=module, params={"precision": precision, "kind": kind})


def block_spec(
    config: TransformerConfig,
    sizes: ModelSizes,
    mapping: MegatronMapping,
    precision: Precision,
    modules_of: Callable[[LayerPrecision], LayerModules],
) -> TransformerBlockSubmodules:
    """The decoder block of this pipeline stage, with TransformerEngine's parameter names."""
    first = get_transformer_layer_offset(config)
    layers = [precision.of_layer(first + index) for index in range(get_num_layers_to_build(config))]
    modules = [modules_of(layer) for layer in layers]
    specs = [
        mapping.layer(_layer_spec(sizes, sizes.has_experts(layer.layer), each), layer)
        for layer, each in zip(layers, modules, strict=True)
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=modules[-1].norm)


def _layer_spec(sizes: ModelSizes, experts: bool, modules: LayerModules) -> ModuleSpec:
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=modules.norm_column_linear("q_proj"),
            core_attention=modules.core_attention,
            linear_proj=modules.row_linear("o_proj"),
            q_layernorm=modules.norm,
            k_layernorm=modules.norm,
        ),
    )
    dense = ModuleSpec(
        module=MLP,
        params={"ffn_hidden_size": sizes.ffn_size},
        submodules=MLPSubmodules(
            linear_fc1=modules.norm_column_linear("gate_proj"),
            linear_fc2=modules.row_linear("down_proj"),
            activation_func=modules.activation,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            # A dense MLP carries its norm inside linear_fc1, as TransformerEngine does.
            pre_mlp_layernorm=modules.norm if experts else IdentityOp,
            mlp=modules.moe if experts else dense,
            mlp_bda=get_bias_dropout_add,
        ),
    )
