"""Qwen3-MoE: Qwen3 with routed experts in every layer."""

from __future__ import annotations

from fp8rl.models.architecture import Architecture
from fp8rl.models.architectures import qwen3
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import attention, mlp
from fp8rl.models.sizes import ModelSizes, family_sizes


def sizes(config: ConfigFile) -> ModelSizes:
    """Read the sizes. Absent keys have the defaults of transformers' Qwen3MoeConfig."""
    config.refuse_variants(qwen3.VARIANTS | {"decoder_sparse_step": 1, "mlp_only_layers": []})
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    kv_heads = config.size("num_key_value_heads", default=4)
    common = family_sizes(config, heads, kv_heads, config.size("head_dim", default=max(1, hidden // heads)))
    return ModelSizes(
        **common,
        # transformers 5 writes the second spelling, older ones the first.
        experts=config.one_of("num_experts", "num_local_experts"),
        top_k=config.size("num_experts_per_tok"),
        expert_size=config.size("moe_intermediate_size"),
        renormalize=config.flag("norm_topk_prob", default=False),
    )


ARCHITECTURE = Architecture(
    name="Qwen3MoeForCausalLM", model_type="qwen3_moe", sizes=sizes, families=(attention.FAMILY, mlp.MOE)
)
