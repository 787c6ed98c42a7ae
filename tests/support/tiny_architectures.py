"""transformers' models of each architecture, tiny and with random weights.

Each function takes the sizes and the keys that all configs have alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fp8rl.models.architectures.olmoe import NORM_EPS
from fp8rl.models.architectures.qwen3_next import FULL, LINEAR
from fp8rl.numerics.core.errors import user_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tests.support.tiny_model import TinyModel

KEY_DIM, VALUE_DIM = 128, 64
"""Widths of a tiny model's linear attention: with two values to a key, a key's values are a whole block."""


YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}


KV_RANK, ROPE_DIM = 256, 64
"""Widths of a tiny model's latent attention. A latent and its rotated key must not be as wide as a head's key: SGLang's
own attention on a CPU then reads the one for the other."""


def qwen2(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    """Dense, whatever the number of experts."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(intermediate_size=shape.intermediate, **common))


def qwen3(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(intermediate_size=shape.intermediate, **common))


def qwen3_moe(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            intermediate_size=shape.intermediate * shape.top_k,
            moe_intermediate_size=shape.intermediate,
            num_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
            norm_topk_prob=shape.renormalize,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            **common,
        )
    )


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def llama(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    """Dense, whatever the number of experts, over a context that was lengthened by a factor of 8."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = common["rope_parameters"] | LLAMA3 | {"original_max_position_embeddings": shape.max_positions // 8}
    config = LlamaConfig(intermediate_size=shape.intermediate, **common | {"rope_parameters": rope})
    return LlamaForCausalLM(config)


def mistral(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    """Dense, whatever the number of experts, without a window."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(intermediate_size=shape.intermediate, sliding_window=None, **common))


def mixtral(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    """With `hidden` channels in all heads together."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            intermediate_size=shape.intermediate,
            num_local_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
            **common,
        )
    )


def olmoe(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    """With as many key-value heads as heads, `hidden` wide together.

    Raises:
        UserError: the dimensions are others.
    """
    from transformers import OlmoeConfig, OlmoeForCausalLM

    width = shape.heads * shape.head_dim
    if (shape.kv_heads, shape.hidden) != (shape.heads, width):
        raise user_error(
            "--kv-heads and --hidden",
            found=f"{shape.kv_heads} and {shape.hidden}",
            expected=f"{shape.heads} and {width} in an OLMoE with --heads {shape.heads} --head-dim {shape.head_dim}",
            remedy="Set them so.",
        )
    return OlmoeForCausalLM(
        OlmoeConfig(
            intermediate_size=shape.intermediate,
            num_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
            norm_topk_prob=False,
            **common | {"rms_norm_eps": NORM_EPS},
        )
    )


def glm4_moe(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    """With a dense first layer, an expert that every token takes, and groups of experts, of which a token may go to
    half."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    rope = common["rope_parameters"] | {"partial_rotary_factor": 0.5}
    return Glm4MoeForCausalLM(
        Glm4MoeConfig(
            intermediate_size=2 * shape.intermediate,
            moe_intermediate_size=shape.intermediate,
            n_routed_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
            n_shared_experts=1,
            n_group=shape.groups,
            topk_group=max(1, shape.groups // 2),
            routed_scaling_factor=1.5,
            first_k_dense_replace=1,
            norm_topk_prob=shape.renormalize,
            use_qk_norm=True,
            **common | {"attention_bias": True, "rope_parameters": rope},
        )
    )


def deepseek_v3_config(shape: TinyModel, common: dict[str, Any]) -> dict[str, Any]:
    """A dense first layer, a shared expert, groups of experts, of which a token may go to half, and YaRN if asked."""
    yarn = YARN | {"original_max_position_embeddings": shape.max_positions // 4} if shape.yarn else {}
    return {name: value for name, value in common.items() if name != "head_dim"} | {
        "num_key_value_heads": shape.heads,
        "intermediate_size": 2 * shape.intermediate,
        "moe_intermediate_size": shape.intermediate,
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "n_shared_experts": 1,
        "n_group": shape.groups,
        "topk_group": max(1, shape.groups // 2),
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "norm_topk_prob": shape.renormalize,
        "q_lora_rank": shape.q_rank or None,
        "kv_lora_rank": KV_RANK,
        "qk_rope_head_dim": ROPE_DIM,
        "rope_parameters": common["rope_parameters"] | yarn,
    }


def deepseek_v3(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    """`head_dim` is the part of a head that is not rotated, and the width of a value."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    own: dict[str, Any] = {"qk_nope_head_dim": shape.head_dim, "v_head_dim": shape.head_dim}
    own |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**deepseek_v3_config(shape, common), **own))


def deepseek_v32_config(shape: TinyModel, common: dict[str, Any]) -> dict[str, Any]:
    """A tiny DeepSeek-V3 whose indexer chooses all of `max_positions`."""
    indexer = {"index_topk": shape.max_positions, "index_head_dim": 2 * ROPE_DIM, "index_n_heads": 2}
    of_experts = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    of_experts |= {"num_experts": shape.experts}  # which transformers reads beside `n_routed_experts`
    return deepseek_v3_config(shape, common) | indexer | of_experts


def deepseek_v32(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    own = {"qk_nope_head_dim": shape.head_dim, "v_head_dim": shape.head_dim}
    return DeepseekV32ForCausalLM(DeepseekV32Config(**deepseek_v32_config(shape, common), **own))


def glm4_moe_lite(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    """Heads whose parts have other widths than DeepSeek-V3's."""
    from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

    own = {"qk_nope_head_dim": 3 * ROPE_DIM, "v_head_dim": 2 * shape.head_dim}
    return Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**deepseek_v3_config(shape, common), **own))


def glm_moe_dsa(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    """Heads whose parts have other widths than DeepSeek-V3.2's; the second layer takes the choice of the first."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    own: dict[str, Any] = {"qk_nope_head_dim": 3 * ROPE_DIM, "v_head_dim": 2 * shape.head_dim}
    own |= {"indexer_types": ["full", "shared", *["full"] * (shape.layers - 2)]}
    return GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**deepseek_v32_config(shape, common), **own))


def qwen3_next_config(shape: TinyModel, common: dict[str, Any]) -> dict[str, Any]:
    """Attention in each fourth layer, or of fewer layers in each second one."""
    every = 4 if shape.layers % 4 == 0 else 2
    return common | {
        "layer_types": [LINEAR if (layer + 1) % every else FULL for layer in range(shape.layers)],
        "full_attention_interval": every,  # which transformers 5 does not write by itself, and engines read
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": KEY_DIM,
        "linear_value_head_dim": VALUE_DIM,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": common["rope_parameters"] | {"partial_rotary_factor": 0.25},
    }


def qwen3_next_experts(shape: TinyModel) -> dict[str, Any]:
    return {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "moe_intermediate_size": shape.intermediate,
        "shared_expert_intermediate_size": shape.intermediate,
    }


def qwen3_next(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    own = qwen3_next_config(shape, common) | qwen3_next_experts(shape)
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(**own, intermediate_size=shape.intermediate, norm_topk_prob=shape.renormalize)
    )


def qwen3_5(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    """Dense, whatever the number of experts."""
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    own = qwen3_next_config(shape, common)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**own, intermediate_size=shape.intermediate))


def qwen3_5_moe(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**qwen3_next_config(shape, common), **qwen3_next_experts(shape)))


MAKERS: dict[str, Callable[[TinyModel, dict[str, Any]], PreTrainedModel]] = {
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "glm4_moe": glm4_moe,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "glm4_moe_lite": glm4_moe_lite,
    "glm_moe_dsa": glm_moe_dsa,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
}
"""How a model is made, by its type in config.json."""
