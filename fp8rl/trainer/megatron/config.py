"""Megatron's TransformerConfig of a model in a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics.config import Mode
from fp8rl.trainer.config import Recompute, TrainerSection
from fp8rl.trainer.megatron.lowering import Lowering
from fp8rl.trainer.modules.families import MegatronFamily

_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    "none": {},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe", "mlp"]},
    "layer": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(
    sizes: ModelSizes,
    families: Sequence[MegatronFamily],
    config: TrainerSection,
    dtype: torch.dtype,
    mode: Mode = "exact",
    lowering: Lowering = Lowering(),  # noqa: B008 (frozen)
) -> TransformerConfig:
    """Megatron's config of a model of these families. Gradients are sums over all ranks; only the lowering turns fused
    CUDA kernels on."""
    config_type = next((each.config_type for each in families if each.config_type is not None), TransformerConfig)
    own = {key: value for each in families for key, value in each.config(sizes).items()}
    general: dict[str, Any] = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden_size,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.kv_heads,
        "kv_channels": sizes.head_dim,
        "ffn_hidden_size": sizes.ffn_size or sizes.expert_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": sizes.norm_eps,
        "layernorm_zero_centered_gamma": sizes.zero_centered_norms,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "use_te_activation_func": mode == "exact",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        "tensor_model_parallel_size": config.tp,
        "pipeline_model_parallel_size": config.pp,
        "context_parallel_size": config.cp,
        "expert_model_parallel_size": config.ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": config.tp > 1,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # with rows of several lengths also where there are no experts
        "calculate_per_token_loss": True,
    }
    return config_type(**general | _RECOMPUTE[config.recompute] | dict(lowering.config) | own)
