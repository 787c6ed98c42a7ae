"""transformers' models of each architecture, tiny and with random weights: the keys that each has of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fp8rl.models.architectures.olmoe import NORM_EPS
from fp8rl.models.architectures.qwen3_next import FULL, LINEAR

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tests.support.tiny_model import TinyModel

Keys = dict[str, Any]

ROPE_DIM = 64
LINEAR_ATTENTION = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
}  # fmt: skip
"""With two values to a key, a key's values are a whole block."""
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}


def tiny(model_type: str, shape: TinyModel, common: Keys) -> PreTrainedModel:
    """Make the model of a type in config.json. common: keys that all configs have."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config = CONFIG_MAPPING[model_type](**OWN[model_type](shape, common))
    model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    return model


def _dense(shape: TinyModel, common: Keys, **own: Any) -> Keys:
    return common | {"intermediate_size": shape.intermediate} | own


def _rope(common: Keys, **changes: Any) -> Keys:
    return common | {"rope_parameters": common["rope_parameters"] | changes}


def _experts(shape: TinyModel) -> Keys:
    return {"num_experts": shape.experts, "num_experts_per_tok": shape.top_k}


def _llama(shape: TinyModel, common: Keys) -> Keys:
    """Over a context that was lengthened by a factor of 8."""
    return _dense(shape, _rope(common, **LLAMA3, original_max_position_embeddings=shape.max_positions // 8))


def _qwen3_moe(shape: TinyModel, common: Keys) -> Keys:
    widths = {"intermediate_size": shape.intermediate * shape.top_k, "moe_intermediate_size": shape.intermediate}
    which = {"norm_topk_prob": shape.renormalize, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return common | widths | _experts(shape) | which


def _olmoe(shape: TinyModel, common: Keys) -> Keys:
    return _dense(shape, common) | _experts(shape) | {"norm_topk_prob": False, "rms_norm_eps": NORM_EPS}


def _mixtral(shape: TinyModel, common: Keys) -> Keys:
    return _dense(shape, common, num_local_experts=shape.experts, num_experts_per_tok=shape.top_k)


def _grouped(shape: TinyModel) -> Keys:
    """A dense first layer, an expert that every token takes, and groups of experts, of which a token may go to half."""
    return {
        "intermediate_size": 2 * shape.intermediate, "moe_intermediate_size": shape.intermediate,
        "n_routed_experts": shape.experts, "num_experts_per_tok": shape.top_k, "n_shared_experts": 1,
        "n_group": shape.groups, "topk_group": max(1, shape.groups // 2), "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1, "norm_topk_prob": shape.renormalize,
    }  # fmt: skip


def _glm4_moe(shape: TinyModel, common: Keys) -> Keys:
    half_rotated = _rope(common, partial_rotary_factor=0.5)
    return half_rotated | _grouped(shape) | {"use_qk_norm": True, "attention_bias": True}


def _latent(shape: TinyModel, common: Keys, keys: int, values: int, **own: Any) -> Keys:
    """Latent attention, and YaRN if asked. keys: channels of a head that are not rotated. values: those of a value."""
    yarn = YARN | {"original_max_position_embeddings": shape.max_positions // 4} if shape.yarn else {}
    without = {name: value for name, value in _rope(common, **yarn).items() if name != "head_dim"}
    # A latent and its rotated key must not be as wide as a head's key: SGLang's own attention on a CPU mistakes them.
    heads = {"num_key_value_heads": shape.heads, "q_lora_rank": shape.q_rank or None, "kv_lora_rank": 256}
    widths = {"qk_rope_head_dim": ROPE_DIM, "qk_nope_head_dim": keys, "v_head_dim": values}
    return without | _grouped(shape) | heads | widths | own


SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


def _indexed(shape: TinyModel, common: Keys, keys: int, values: int, **own: Any) -> Keys:
    """An indexer that chooses all of `max_positions`. transformers reads `num_experts` beside `n_routed_experts`."""
    indexer = {"index_topk": shape.max_positions, "index_head_dim": 2 * ROPE_DIM, "index_n_heads": 2}
    return _latent(shape, common, keys, values, **indexer, **SIGMOID, num_experts=shape.experts, **own)


def _glm_moe_dsa(shape: TinyModel, common: Keys) -> Keys:
    """The second layer takes the choice of the first."""
    types = ["full", "shared", *["full"] * (shape.layers - 2)]
    return _indexed(shape, common, 3 * ROPE_DIM, 2 * shape.head_dim, indexer_types=types)


def _linear(shape: TinyModel, common: Keys, **own: Any) -> Keys:
    """Attention in each fourth layer, or of fewer layers in each second one."""
    every = 4 if shape.layers % 4 == 0 else 2
    types = [LINEAR if (layer + 1) % every else FULL for layer in range(shape.layers)]
    # transformers 5 does not write the interval by itself, and engines read it.
    layers = {"layer_types": types, "full_attention_interval": every}
    return _rope(common, partial_rotary_factor=0.25) | layers | LINEAR_ATTENTION | own


def _shared_expert(shape: TinyModel) -> Keys:
    widths = {"moe_intermediate_size": shape.intermediate, "shared_expert_intermediate_size": shape.intermediate}
    return _experts(shape) | widths


def _qwen3_next(shape: TinyModel, common: Keys) -> Keys:
    linear = _linear(shape, common, norm_topk_prob=shape.renormalize)
    return _dense(shape, linear) | _shared_expert(shape)


OWN: dict[str, Callable[[TinyModel, Keys], Keys]] = {
    "qwen2": _dense, "qwen3": _dense, "qwen3_moe": _qwen3_moe, "llama": _llama,
    "mistral": lambda shape, common: _dense(shape, common, sliding_window=None), "mixtral": _mixtral, "olmoe": _olmoe,
    "glm4_moe": _glm4_moe,
    "deepseek_v3": lambda shape, common: _latent(shape, common, shape.head_dim, shape.head_dim, **SIGMOID),
    "deepseek_v32": lambda shape, common: _indexed(shape, common, shape.head_dim, shape.head_dim),
    "glm4_moe_lite": lambda shape, common: _latent(shape, common, 3 * ROPE_DIM, 2 * shape.head_dim),
    "glm_moe_dsa": _glm_moe_dsa, "qwen3_next": _qwen3_next,
    "qwen3_5_text": lambda shape, common: _dense(shape, _linear(shape, common)),
    "qwen3_5_moe_text": lambda shape, common: _linear(shape, common, **_shared_expert(shape)),
}  # fmt: skip
"""The keys of a model's config by its type."""
