"""OLMoE: routed experts in every layer, and queries and keys that are normed over all heads of a token together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from models.architecture import Architecture
from models.architectures.qwen2 import CACHE_SCALES, HEAD_NORMS
from models.architectures.qwen3 import (
    ATTENTION_KINDS,
    ATTENTION_OPS,
    FIRST_OPS,
    LAST_OPS,
    VARIANTS,
    attention_tensors,
    attention_weights,
    checked,
    embedding,
    family_sizes,
    last_tensors,
    post_norm,
)
from models.architectures.qwen3_moe import EXPERT_KINDS, MOE_OPS, moe_tensors
from models.config_file import ConfigFile
from models.forms import HEAD_NORM, HEADS_NORM
from models.shape import Shape, WeightGroup, decoder
from models.sizes import ModelSizes
from models.tensors import TensorRow
from models.trace import Forward

NORM_EPS = 1e-5


def sizes(config: ConfigFile) -> ModelSizes:
    """Absent keys have the defaults of transformers' OlmoeConfig. SGLang's model has some values fixed in its code."""
    config.refuse_variants(
        VARIANTS | {"clip_qkv": None, "sliding_window": None, "norm_topk_prob": False, "tie_word_embeddings": False}
    )
    heads, hidden = config.size("num_attention_heads", default=16), config.size("hidden_size", default=2048)
    kv_heads = config.size("num_key_value_heads", default=heads, if_null=heads)
    norm_eps = config.number("rms_norm_eps", default=NORM_EPS)
    head_dim = config.size("head_dim", default=max(1, hidden // heads))
    for name, found, fixed in (
        ("num_key_value_heads", kv_heads, heads),
        ("rms_norm_eps", norm_eps, NORM_EPS),
        ("head_dim", head_dim, hidden / heads),
    ):
        if found != fixed:
            remedy = "Use another model: SGLang computes OLMoE with this value only."
            raise config.refusal(name, found, f"{fixed:g}", remedy)
    attention = family_sizes(config, heads, kv_heads, head_dim) | {"norm_eps": norm_eps}
    return checked(
        config,
        ModelSizes(
            **attention,
            experts=config.one_of("num_experts", "num_local_experts"),
            top_k=config.size("num_experts_per_tok", default=8),
            expert_size=config.size("intermediate_size", default=2048),
            renormalize=False,
            heads_normed_together=True,
        ),
    )


def shape(sizes: ModelSizes) -> Shape:
    return decoder(sizes, _attention_weights(sizes), cached=2 * sizes.kv_heads * sizes.head_dim)


def _attention_weights(sizes: ModelSizes) -> Iterator[WeightGroup]:
    for weight in attention_weights(sizes):
        yield replace(weight, rows=_width(sizes, weight.name)) if weight.name in HEAD_NORMS else weight


def tensors(sizes: ModelSizes) -> Iterator[TensorRow]:
    yield embedding(sizes)
    for layer in range(sizes.layers):
        for row in attention_tensors(sizes, layer):
            yield _over_all_heads(sizes, row) if row.op in HEAD_NORMS else row
        yield post_norm(sizes, layer, "pre_mlp_layernorm.weight")
        yield from moe_tensors(sizes, layer)
    yield from last_tensors(sizes)


def _over_all_heads(sizes: ModelSizes, norm: TensorRow) -> TensorRow:
    there = norm.megatron.parameter.removesuffix("weight") + "norm.weight"
    return replace(norm, shape=(_width(sizes, norm.op),), megatron=replace(norm.megatron, parameter=there))


def _width(sizes: ModelSizes, norm: str) -> int:
    return sizes.head_dim * (sizes.heads if norm == "q_norm" else sizes.kv_heads)


def forward(sizes: ModelSizes) -> Forward:
    attention = tuple(replace(op, form=HEADS_NORM) if op.form is HEAD_NORM else op for op in ATTENTION_OPS)
    return Forward(FIRST_OPS, (attention + MOE_OPS,) * sizes.layers, LAST_OPS)


ARCHITECTURE = Architecture(
    name="OlmoeForCausalLM",
    model_type="olmoe",
    sizes=sizes,
    shape=shape,
    tensors=tensors,
    forward=forward,
    kinds=(*ATTENTION_KINDS, *EXPERT_KINDS),
    engine_extras=CACHE_SCALES,
)
