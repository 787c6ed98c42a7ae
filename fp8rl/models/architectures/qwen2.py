"""Qwen2 and Qwen2.5, dense: Qwen3 with biases on queries, keys and values in place of norms of the heads."""

from __future__ import annotations

from fp8rl.models.architecture import Architecture
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import attention, mlp
from fp8rl.models.sizes import ModelSizes, family_sizes

VARIANTS = {"hidden_act": "silu", "dual_chunk_attention_config": None}
"""The only supported values of these keys. Every Qwen2 has biases; no key turns them off."""


def sizes(config: ConfigFile) -> ModelSizes:
    """Read the sizes. Absent keys have the defaults of transformers' Qwen2Config."""
    config.refuse_variants(VARIANTS)
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    kv_heads = config.size("num_key_value_heads", default=32, if_null=heads)
    common = family_sizes(config, heads, kv_heads, config.size("head_dim", default=max(1, hidden // heads)))
    ffn_size = config.size("intermediate_size")
    return ModelSizes(**common, ffn_size=ffn_size, head_norms=None, qkv_bias=True, cpu_head_dim=hidden // heads)


ARCHITECTURE = Architecture(
    name="Qwen2ForCausalLM", model_type="qwen2", sizes=sizes, families=(attention.FAMILY, mlp.DENSE)
)
