"""Llama 3, dense: Qwen3 without norms of the heads. Llama 3.1 and later lengthen the context (`rope_type: llama3`)."""

from __future__ import annotations

from fp8rl.models.architecture import Architecture
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import attention, mlp
from fp8rl.models.sizes import ModelSizes, family_sizes

VARIANTS = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
"""The only supported values of these keys."""


def sizes(config: ConfigFile, kv_heads: int | None = None) -> ModelSizes:
    """Read the sizes. Absent keys have the defaults of transformers' LlamaConfig. kv_heads: the default number of
    key-value heads; None: the number of query heads."""
    config.refuse_variants(VARIANTS, scaled=True)
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    head_dim = max(1, hidden // heads)
    head_dim = config.size("head_dim", default=head_dim, if_null=head_dim)
    kv_heads = config.size("num_key_value_heads", default=kv_heads or heads, if_null=heads)
    return ModelSizes(
        **family_sizes(config, heads, kv_heads, head_dim),
        ffn_size=config.size("intermediate_size"),
        head_norms=None,
        rope_scaling=config.rope_scaling("llama3"),
    )


AS_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": None,
    "transformers_version": "5.0.0",  # for a lower version, transformers says that the tokenizer is wrong
}
ARCHITECTURE = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    sizes=sizes,
    families=(attention.FAMILY, mlp.DENSE),
    any_heads=AS_MISTRAL,
)
