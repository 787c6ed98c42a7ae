"""Qwen3, dense: grouped-query attention with normed queries and keys, and an MLP with SwiGLU."""

from __future__ import annotations

from fp8rl.models.architecture import Architecture
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import attention, mlp
from fp8rl.models.sizes import ModelSizes, family_sizes

VARIANTS = {"hidden_act": "silu", "attention_bias": False}
"""The only supported values of these keys."""


def sizes(config: ConfigFile) -> ModelSizes:
    """Read the sizes. Absent keys have the defaults of transformers' Qwen3Config."""
    config.refuse_variants(VARIANTS)
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", default=32, if_null=heads)
    common = family_sizes(config, heads, kv_heads, config.size("head_dim", default=128))
    return ModelSizes(**common, ffn_size=config.size("intermediate_size"))


ARCHITECTURE = Architecture(
    name="Qwen3ForCausalLM", model_type="qwen3", sizes=sizes, families=(attention.FAMILY, mlp.DENSE)
)
