"""OLMoE: routed experts in every layer, and queries and keys that are normed over all heads of a token together."""

from __future__ import annotations

from fp8rl.models.architecture import Architecture
from fp8rl.models.architectures import qwen3
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import attention, mlp
from fp8rl.models.sizes import ModelSizes, family_sizes

NORM_EPS = 1e-5


def sizes(config: ConfigFile) -> ModelSizes:
    """Read the sizes. Absent keys have the defaults of transformers' OlmoeConfig. SGLang's code fixes some values."""
    config.refuse_variants(
        qwen3.VARIANTS
        | {"clip_qkv": None, "sliding_window": None, "norm_topk_prob": False, "tie_word_embeddings": False}
    )
    heads, hidden = config.size("num_attention_heads", default=16), config.size("hidden_size")
    kv_heads = config.size("num_key_value_heads", default=heads, if_null=heads)
    head_dim = config.size("head_dim", default=max(1, hidden // heads))
    common = family_sizes(config, heads, kv_heads, head_dim, NORM_EPS)
    config.refuse_unfixed(
        "OLMoE",
        num_key_value_heads=(kv_heads, heads),
        rms_norm_eps=(common["norm_eps"], NORM_EPS),
        head_dim=(head_dim, hidden / heads),
    )
    return ModelSizes(
        **common,
        experts=config.one_of("num_experts", "num_local_experts"),
        top_k=config.size("num_experts_per_tok", default=8),
        expert_size=config.size("intermediate_size", default=2048),
        renormalize=False,
        head_norms="together",
    )


ARCHITECTURE = Architecture(
    name="OlmoeForCausalLM", model_type="olmoe", sizes=sizes, families=(attention.FAMILY, mlp.MOE)
)
