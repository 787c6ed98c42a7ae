"""Qwen2 and Qwen2.5, dense: Qwen3 with biases on queries, keys and values in place of norms of the heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from models.architecture import Architecture
from models.architectures.qwen3 import (
    ATTENTION_KINDS,
    ATTENTION_OPS,
    DENSE_OPS,
    FIRST_OPS,
    LAST_OPS,
    attention_tensors,
    attention_weights,
    checked,
    dense_mlp_tensors,
    embedding,
    family_sizes,
    last_tensors,
    post_norm,
)
from models.config_file import ConfigFile
from models.shape import Shape, WeightGroup, decoder
from models.sizes import ModelSizes
from models.tensors import Location, TensorRow
from models.trace import Forward

VARIANTS = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "partial_rotary_factor": 1,
    "dual_chunk_attention_config": None,
}
"""The only values of these keys that the shared ops define. Every Qwen2 has its biases, which no key turns off."""
HEAD_NORMS = ("q_norm", "k_norm")
CACHE_SCALES = frozenset({"k_scale", "v_scale"})
"""What SGLang gives the attention of a quantized model for a cache in FP8, which nothing here uses."""


def sizes(config: ConfigFile) -> ModelSizes:
    """Absent keys have the defaults of transformers' Qwen2Config."""
    config.refuse_variants(VARIANTS)
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    kv_heads = config.size("num_key_value_heads", default=32, if_null=heads)
    attention = family_sizes(config, heads, kv_heads, config.size("head_dim", default=max(1, hidden // heads)))
    return checked(config, ModelSizes(**attention, ffn_size=config.size("intermediate_size")))


def shape(sizes: ModelSizes) -> Shape:
    return decoder(sizes, _attention_weights(sizes), cached=2 * sizes.kv_heads * sizes.head_dim)


def _attention_weights(sizes: ModelSizes) -> Iterator[WeightGroup]:
    for weight in attention_weights(sizes):
        if weight.name not in HEAD_NORMS:
            yield weight
        if weight.name == "qkv":
            yield replace(weight, name="qkv_bias", columns=1, kind=None, taken=0)


def tensors(sizes: ModelSizes) -> Iterator[TensorRow]:
    yield embedding(sizes)
    for layer in range(sizes.layers):
        for row in attention_tensors(sizes, layer):
            if row.op not in HEAD_NORMS:
                yield row
            if row.op == "qkv":
                yield _bias(row)
        yield post_norm(sizes, layer, "mlp.linear_fc1.layer_norm_weight")
        yield from dense_mlp_tensors(sizes, layer)
    yield from last_tensors(sizes)


def _bias(weight: TensorRow) -> TensorRow:
    """The bias behind a product, which no spec quantizes and which lies in a parameter as its weight does."""

    def beside(where: Location) -> Location:
        return replace(where, parameter=where.parameter.removesuffix("weight") + "bias")

    return replace(
        weight,
        name=weight.name.removesuffix("weight") + "bias",
        shape=weight.shape[:1],
        kind=None,
        product=False,
        engine=beside(weight.engine),
        megatron=beside(weight.megatron),
    )


def forward(sizes: ModelSizes) -> Forward:
    attention = tuple(op for op in ATTENTION_OPS if op.name not in HEAD_NORMS)
    return Forward(FIRST_OPS, (attention + DENSE_OPS,) * sizes.layers, LAST_OPS)


ARCHITECTURE = Architecture(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    sizes=sizes,
    shape=shape,
    tensors=tensors,
    forward=forward,
    kinds=(*ATTENTION_KINDS, ("gate_proj", "up_proj"), ("down_proj",)),
    engine_extras=CACHE_SCALES,
)
