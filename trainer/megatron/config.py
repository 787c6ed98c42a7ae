"""Megatron's TransformerConfig of a model in a layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig

from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics.config import Mode
from fp8rl.trainer.config import Recompute, TrainerSection
from fp8rl.trainer.megatron.lowering import Lowering
from fp8rl.trainer.modules import layer as parts
from fp8rl.trainer.modules.layer import Fields, Layer, Router

_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    "none": {},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe", "mlp"]},
    "layer": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(
    sizes: ModelSizes,
    mapping: MegatronMapping,
    config: TrainerSection,
    dtype: torch.dtype,
    mode: Mode = "exact",
    lowering: Lowering = Lowering(),  # noqa: B008 (frozen)
) -> TransformerConfig:
    """Megatron's config. Gradients are sums over all ranks; only the lowering turns fused CUDA kernels on."""
    moe: dict[str, Any] = {}
    if sizes.moe:
        moe = {
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
            moe["moe_layer_freq"] = [int(has) for has in has_experts]
    if sizes.shared_size:
        moe["moe_shared_expert_intermediate_size"] = sizes.shared_size
    if sizes.sigmoid_router is not None:
        grouped = sizes.sigmoid_router.groups > 1
        moe |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": False,
            "moe_router_dtype": "fp32",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_num_groups": sizes.sigmoid_router.groups if grouped else None,
            "moe_router_group_topk": sizes.sigmoid_router.kept_groups if grouped else None,
            "moe_router_topk_scaling_factor": sizes.sigmoid_router.factor,
        }
    return (MLATransformerConfig if sizes.latent else TransformerConfig)(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        kv_channels=sizes.head_dim,
        ffn_hidden_size=sizes.ffn_size or sizes.expert_size,
        normalization="RMSNorm",
        layernorm_epsilon=sizes.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=mode == "exact",
        add_bias_linear=False,
        add_qkv_bias=sizes.qkv_bias,
        qk_layernorm=sizes.head_norms is not None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        context_parallel_size=config.cp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=config.tp > 1,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        **_RECOMPUTE[config.recompute],
        **moe,
        **mapping.config(sizes),
        **{**lowering.config, **_latent(sizes)},
    )


def _latent(sizes: ModelSizes) -> dict[str, Any]:
    """Return what the config says of latent attention."""
    latent, yarn = sizes.latent, sizes.yarn
    if latent is None:
        return {}
    rope: dict[str, Any] = {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    if yarn is not None:
        rope = {
            "rope_type": "yarn",
            "rotary_scaling_factor": yarn.factor,
            "original_max_position_embeddings": yarn.original,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale,
        }
    return rope | {
        "apply_rope_fusion": False,  # of latent attention it is for YaRN alone, and experimental
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": sizes.plain_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rotary_base": sizes.rope_theta,
    }


# What Megatron's GPTModel has to be told of an architecture beside the sizes of a model.


@dataclass(frozen=True)
class MegatronMapping:
    """One architecture in Megatron: the parts of its layers, and what else TransformerConfig is to say.

    Attributes:
        attention, mlp: make their fields of a layer, a norm before it among them, in one numerics mode as in the other.
        router: makes what `mlp` puts in front of routed experts.
        config: further keywords of TransformerConfig.
    """

    attention: Callable[[Layer], Fields] = parts.attention
    mlp: Callable[[Layer, Router], Fields] = parts.mlp
    router: Callable[[Layer], ModuleSpec] = parts.router
    config: Callable[[ModelSizes], dict[str, Any]] = lambda sizes: {}


USUAL = MegatronMapping()
MAPPINGS: dict[str, MegatronMapping] = {}
"""The mappings of architectures that Megatron has to be told more of than their sizes say, by name."""
