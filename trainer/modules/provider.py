"""Which module stands where in a Megatron layer when every op is the shared one."""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from numerics import ops
from trainer.hf_config import ModelShape
from trainer.modules.attention import CoreAttention
from trainer.modules.experts import Experts, GroupedWeights, MoE
from trainer.modules.linear import Embedding, NormColumnLinear, OutputLinear, RowLinear, tag_split
from trainer.modules.norm import RMSNorm
from trainer.modules.precision import Precision
from trainer.modules.router import Router


def block_spec(config: TransformerConfig, shape: ModelShape, precision: Precision) -> TransformerBlockSubmodules:
    """The decoder block of this pipeline stage, with TransformerEngine's parameter names."""
    layer = _layer_spec(shape, precision)
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)


def use_shared_ends(model: GPTModel) -> None:
    """Put the shared ops at both ends of the model.

    GPTModel names the classes of its embedding and output projection itself, so the finished instances change class.
    """
    if model.pre_process:
        model.embedding.word_embeddings.__class__ = Embedding
        tag_split(model.embedding.word_embeddings.weight, 0)
    if model.post_process:
        model.output_layer.__class__ = OutputLinear
        if model.output_layer.weight is not None:
            tag_split(model.output_layer.weight, 0)


class SwiGLU(nn.Module):
    """`ops.swiglu` as a module."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        """[..., 2F] -> [..., F]"""
        return ops.swiglu(gate_up)


def _layer_spec(shape: ModelShape, precision: Precision) -> ModuleSpec:
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ModuleSpec(module=NormColumnLinear, params={"precision": precision, "kind": "q_proj"}),
            core_attention=ModuleSpec(module=CoreAttention, params={"rope_theta": shape.rope_theta}),
            linear_proj=ModuleSpec(module=RowLinear, params={"precision": precision, "kind": "o_proj"}),
            q_layernorm=RMSNorm,
            k_layernorm=RMSNorm,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            # A dense MLP carries its norm inside linear_fc1, as TransformerEngine does.
            pre_mlp_layernorm=RMSNorm if shape.moe else IdentityOp,
            mlp=_moe_spec(shape, precision) if shape.moe else _dense_spec(shape, precision),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _dense_spec(shape: ModelShape, precision: Precision) -> ModuleSpec:
    return ModuleSpec(
        module=MLP,
        params={"ffn_hidden_size": shape.ffn_size},
        submodules=MLPSubmodules(
            linear_fc1=ModuleSpec(module=NormColumnLinear, params={"precision": precision, "kind": "gate_proj"}),
            linear_fc2=ModuleSpec(module=RowLinear, params={"precision": precision, "kind": "down_proj"}),
            activation_func=SwiGLU,
        ),
    )


def _moe_spec(shape: ModelShape, precision: Precision) -> ModuleSpec:
    experts = ModuleSpec(
        module=Experts,
        params={"precision": precision},
        submodules=MLPSubmodules(linear_fc1=GroupedWeights, linear_fc2=GroupedWeights),
    )
    router = ModuleSpec(module=Router, params={"renormalize": shape.renormalize})
    return ModuleSpec(module=MoE, submodules=MoESubmodules(router=router, experts=experts))
