"""Mixtral: routed experts in every layer, plain attention without biases or norms, and names of its own for the MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp8rl.models.architecture import Architecture
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import attention, mlp
from fp8rl.models.sizes import ModelSizes, family_sizes
from fp8rl.models.tensors import TensorRow

PLACE = "block_sparse_moe."
EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
VARIANTS = {"hidden_act": "silu", "sliding_window": None, "tie_word_embeddings": False}
"""The only values of these keys that SGLang's model and this project support."""


def sizes(config: ConfigFile) -> ModelSizes:
    """Read the sizes. Absent keys have the defaults of transformers' MixtralConfig. Most sizes must be present."""
    config.refuse_variants(VARIANTS)
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    kv_heads = config.size("num_key_value_heads", default=8)
    width = max(1, hidden // heads)
    head_dim = config.size("head_dim", default=width, if_null=width)
    attention = family_sizes(config, heads, kv_heads, head_dim, norm_eps=1e-5, theta=1e6)
    theta = attention["rope_theta"]
    config.refuse_unfixed("Mixtral", head_dim=(head_dim, hidden / heads), rope_theta=(theta, int(theta)))
    return ModelSizes(
        **attention,
        experts=config.one_of("num_local_experts", "num_experts"),
        top_k=config.size("num_experts_per_tok", default=2),
        expert_size=config.size("intermediate_size"),
        head_norms=None,
    )


def block_sparse_tensors(sizes: ModelSizes, layer: int) -> Iterator[TensorRow]:
    """Yield the rows of router and experts under Mixtral's names."""
    for row in mlp.moe_tensors(sizes, layer):
        if row.op != "post_norm":
            *before, weight, suffix = row.name.replace("mlp.", PLACE).split(".")
            weight = weight if row.expert is None else EXPERT[weight]
            engine = replace(row.engine, parameter=row.engine.parameter.replace("mlp.", PLACE))
            row = replace(row, name=".".join((*before, weight, suffix)), engine=engine)
        yield row


ARCHITECTURE = Architecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    sizes=sizes,
    families=(attention.FAMILY, replace(mlp.MOE, tensors=block_sparse_tensors)),
)
