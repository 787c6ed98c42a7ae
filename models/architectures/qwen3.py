"""Qwen3, dense: grouped-query attention with normed queries and keys, SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator

from fp8rl.models import parts
from fp8rl.models.architecture import Architecture
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow
from fp8rl.models.trace import Forward

VARIANTS = {"hidden_act": "silu", "attention_bias": False, "partial_rotary_factor": 1}
"""The only values of these keys that the shared ops define."""


def sizes(config: ConfigFile) -> ModelSizes:
    """Absent keys have the defaults of transformers' Qwen3Config."""
    config.refuse_variants(VARIANTS)
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", default=32, if_null=heads)
    attention = parts.family_sizes(config, heads, kv_heads, config.size("head_dim", default=128))
    return parts.checked(config, ModelSizes(**attention, ffn_size=config.size("intermediate_size")))


def tensors(sizes: ModelSizes) -> Iterator[TensorRow]:
    yield parts.embedding(sizes)
    for layer in range(sizes.layers):
        yield from parts.attention_tensors(sizes, layer)
        yield parts.post_norm(sizes, layer, "mlp.linear_fc1.layer_norm_weight")
        yield from parts.dense_mlp_tensors(sizes, layer)
    yield from parts.last_tensors(sizes)


def forward(sizes: ModelSizes) -> Forward:
    layer = parts.attention_ops(sizes) + parts.DENSE_OPS
    return Forward(parts.FIRST_OPS, (layer,) * sizes.layers, parts.LAST_OPS)


ARCHITECTURE = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    sizes=sizes,
    shape=parts.shape,
    tensors=tensors,
    forward=forward,
    kinds=(*parts.ATTENTION_KINDS, *parts.DENSE_KINDS),
)
