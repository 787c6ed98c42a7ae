"""GLM-4.5, GLM-4.5-Air and GLM-4.6: a sigmoid router with a bias for each expert, shared experts, dense first layers.

Attention is Qwen3's with biases on queries, keys and values, rotation of a part of each head, and norms of heads in the
larger models only. The draft layers after the last layer (multi-token prediction) are kept as they are.
"""

from __future__ import annotations

from fp8rl.models.architecture import Architecture
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import attention, mlp
from fp8rl.models.sizes import ModelSizes, family_sizes, sigmoid_router


def sizes(config: ConfigFile) -> ModelSizes:
    """Read the sizes. Absent keys have the defaults of transformers' Glm4MoeConfig."""
    config.refuse_variants({"hidden_act": "silu"}, rotary_part=True)
    heads, hidden = config.size("num_attention_heads", default=96), config.size("hidden_size")
    head_dim = config.size("head_dim", default=max(1, hidden // heads))
    kv_heads = config.size("num_key_value_heads", default=8)
    attention = family_sizes(config, heads, kv_heads, head_dim, norm_eps=1e-5)
    attention["rotary_dim"] = config.rotary_dim(head_dim, default=0.5)
    expert_size = config.size("moe_intermediate_size", default=1408)
    experts, groups = config.size("n_routed_experts", default=128), config.size("n_group", default=1)
    kept, top_k = config.size("topk_group", default=1), config.size("num_experts_per_tok", default=8)
    router = sigmoid_router(config, experts, groups, kept, top_k, 1.0)
    return ModelSizes(
        **attention,
        ffn_size=config.size("intermediate_size", default=10944),
        experts=experts,
        top_k=top_k,
        expert_size=expert_size,
        dense_layers=config.size("first_k_dense_replace", default=1),
        shared_size=config.size("n_shared_experts", default=1) * expert_size,
        renormalize=config.flag("norm_topk_prob", default=True),
        sigmoid_router=router,
        head_norms="each" if config.flag("use_qk_norm", default=False) else None,
        qkv_bias=config.flag("attention_bias", default=False),
        draft_layers=config.count("num_nextn_predict_layers"),
    )


ARCHITECTURE = Architecture(
    name="Glm4MoeForCausalLM", model_type="glm4_moe", sizes=sizes, families=(attention.FAMILY, mlp.DENSE, mlp.MOE)
)
