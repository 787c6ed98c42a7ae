"""Qwen3, dense: grouped-query attention with normed queries and keys, SwiGLU.

What the Qwen3 family shares stands here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from models.architecture import Architecture
from models.config_file import ConfigFile
from models.forms import ADD_NORM, ATTENTION, EMBED, HEAD_NORM, LINEAR, LOGPROBS, QKV, ROPE, SWIGLU
from models.shape import Shape, WeightGroup, decoder, product, vector
from models.sizes import ModelSizes
from models.tensors import Location, TensorRow
from models.trace import TOKENS, Forward, Op

VARIANTS = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "partial_rotary_factor": 1}
"""The only values of these keys that the shared ops define."""
ATTENTION_KINDS = (("q_proj", "k_proj", "v_proj"), ("o_proj",))


def sizes(config: ConfigFile) -> ModelSizes:
    """Absent keys have the defaults of transformers' Qwen3Config."""
    config.refuse_variants(VARIANTS)
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", default=32, if_null=heads)
    attention = family_sizes(config, heads, kv_heads, config.size("head_dim", default=128))
    return checked(config, ModelSizes(**attention, ffn_size=config.size("intermediate_size")))


def family_sizes(config: ConfigFile, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """All but the MLPs: the arguments of ModelSizes that the whole family reads alike."""
    return {
        "layers": config.size("num_hidden_layers"),
        "hidden_size": config.size("hidden_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_dim": head_dim,
        "vocab_size": config.size("vocab_size"),
        "norm_eps": config.number("rms_norm_eps", default=1e-6),
        "rope_theta": config.rope_theta(),
        "max_positions": config.size("max_position_embeddings"),
        "tied": config.flag("tie_word_embeddings", default=False),
    }


def checked(config: ConfigFile, sizes: ModelSizes) -> ModelSizes:
    """Refuse heads that cannot be grouped or rotated, and more experts of a token than there are."""
    if sizes.heads % sizes.kv_heads:
        raise config.refusal("num_key_value_heads", sizes.kv_heads, f"a divisor of num_attention_heads = {sizes.heads}")
    if sizes.head_dim % 2:
        raise config.refusal("head_dim", sizes.head_dim, "an even number: rotary embeddings turn pairs")
    if sizes.top_k > sizes.experts:
        raise config.refusal("num_experts_per_tok", sizes.top_k, f"at most num_experts = {sizes.experts}")
    return sizes


def shape(sizes: ModelSizes) -> Shape:
    return decoder(sizes, attention_weights(sizes), cached=2 * sizes.kv_heads * sizes.head_dim)


def attention_weights(sizes: ModelSizes) -> Iterator[WeightGroup]:
    """Grouped queries with normed queries and keys, of all layers."""
    hidden, head_dim, layers = sizes.hidden_size, sizes.head_dim, range(sizes.layers)
    pieces = (sizes.heads * head_dim, sizes.kv_heads * head_dim, sizes.kv_heads * head_dim)
    yield product("qkv", sum(pieces), hidden, layers, kind="q_proj", pieces=pieces)
    yield vector("q_norm", head_dim, layers)
    yield vector("k_norm", head_dim, layers)
    yield product("o", hidden, sizes.heads * head_dim, layers, kind="o_proj")


def tensors(sizes: ModelSizes) -> Iterator[TensorRow]:
    yield embedding(sizes)
    for layer in range(sizes.layers):
        yield from attention_tensors(sizes, layer)
        yield post_norm(sizes, layer, "mlp.linear_fc1.layer_norm_weight")
        yield from dense_mlp_tensors(sizes, layer)
    yield from last_tensors(sizes)


def forward(sizes: ModelSizes) -> Forward:
    return Forward(FIRST_OPS, (ATTENTION_OPS + DENSE_OPS,) * sizes.layers, LAST_OPS)


FIRST_OPS = (Op("embed", EMBED, (TOKENS,), ("x",), "model.embed_tokens", "embedding"),)

ATTENTION_OPS = (
    Op(
        "input_norm",
        ADD_NORM,
        ("x", "residual"),
        ("x", "residual"),
        "input_layernorm",
        "self_attention.linear_qkv",
    ),
    Op("qkv", QKV, ("x",), ("q", "k", "v"), "self_attn.qkv_proj", "self_attention.linear_qkv"),
    Op("q_norm", HEAD_NORM, ("q",), ("q",), "self_attn.q_norm", "self_attention.q_layernorm"),
    Op("k_norm", HEAD_NORM, ("k",), ("k",), "self_attn.k_norm", "self_attention.k_layernorm"),
    Op("rope", ROPE, ("q", "k"), ("q", "k"), "self_attn.rotary_emb", "self_attention.core_attention"),
    Op("attention", ATTENTION, ("q", "k", "v"), ("x",), "self_attn.attn", "self_attention.core_attention"),
    Op("o_proj", LINEAR, ("x",), ("x",), "self_attn.o_proj", "self_attention.linear_proj"),
)

DENSE_OPS = (
    Op("post_norm", ADD_NORM, ("x", "residual"), ("x", "residual"), "post_attention_layernorm", "mlp.linear_fc1"),
    Op("gate_up", LINEAR, ("x",), ("x",), "mlp.gate_up_proj", "mlp.linear_fc1"),
    Op("swiglu", SWIGLU, ("x",), ("x",), "mlp.act_fn", "mlp.linear_fc2"),
    Op("down", LINEAR, ("x",), ("x",), "mlp.down_proj", "mlp.linear_fc2"),
)

LAST_OPS = (
    Op("final_norm", ADD_NORM, ("x", "residual"), ("x", "residual"), "model.norm", "decoder.final_layernorm"),
    Op("lm_head", LINEAR, ("x",), ("logits",), "lm_head", "output_layer"),
    Op("logprobs", LOGPROBS, ("logits",), ("logprobs",)),
)


def embedding(sizes: ModelSizes) -> TensorRow:
    return TensorRow(
        name="model.embed_tokens.weight",
        shape=(sizes.vocab_size, sizes.hidden_size),
        op="embed",
        engine=Location("model.embed_tokens.weight", padded=True, split=0),
        megatron=Location("embedding.word_embeddings.weight"),
        copies=("output_layer.weight",) if sizes.tied else (),
    )


def attention_tensors(sizes: ModelSizes, layer: int) -> Iterator[TensorRow]:
    """The norm before the attention, and all that is inside it."""
    hidden, head_dim = sizes.hidden_size, sizes.head_dim
    yield norm(
        f"model.layers.{layer}.input_layernorm.weight",
        hidden,
        "input_norm",
        layer,
        f"decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight",
    )
    inside, there = f"model.layers.{layer}.self_attn.", f"decoder.layers.{layer}.self_attention."
    for name, heads in (("q_proj", sizes.heads), ("k_proj", sizes.kv_heads), ("v_proj", sizes.kv_heads)):
        yield TensorRow(
            name=f"{inside}{name}.weight",
            shape=(heads * head_dim, hidden),
            op="qkv",
            layer=layer,
            kind=name,
            product=True,
            engine=Location(f"{inside}qkv_proj.weight", split=0),
            megatron=Location(f"{there}linear_qkv.weight", layout="heads"),
        )
    yield norm(f"{inside}q_norm.weight", head_dim, "q_norm", layer, f"{there}q_layernorm.weight")
    yield norm(f"{inside}k_norm.weight", head_dim, "k_norm", layer, f"{there}k_layernorm.weight")
    yield TensorRow(
        name=f"{inside}o_proj.weight",
        shape=(hidden, sizes.heads * head_dim),
        op="o_proj",
        layer=layer,
        kind="o_proj",
        product=True,
        engine=Location(f"{inside}o_proj.weight", split=1),
        megatron=Location(f"{there}linear_proj.weight"),
    )


def post_norm(sizes: ModelSizes, layer: int, megatron: str) -> TensorRow:
    """The norm between attention and MLP; megatron: where the trainer holds it in the layer."""
    name = f"model.layers.{layer}.post_attention_layernorm.weight"
    return norm(name, sizes.hidden_size, "post_norm", layer, f"decoder.layers.{layer}.{megatron}")


def dense_mlp_tensors(sizes: ModelSizes, layer: int) -> Iterator[TensorRow]:
    inside, there = f"model.layers.{layer}.mlp.", f"decoder.layers.{layer}.mlp."
    hidden, width = sizes.hidden_size, sizes.ffn_size
    for name in ("gate_proj", "up_proj"):
        yield TensorRow(
            name=f"{inside}{name}.weight",
            shape=(width, hidden),
            op="gate_up",
            layer=layer,
            kind=name,
            product=True,
            engine=Location(f"{inside}gate_up_proj.weight", split=0),
            megatron=Location(f"{there}linear_fc1.weight"),
        )
    yield TensorRow(
        name=f"{inside}down_proj.weight",
        shape=(hidden, width),
        op="down",
        layer=layer,
        kind="down_proj",
        product=True,
        engine=Location(f"{inside}down_proj.weight", split=1),
        megatron=Location(f"{there}linear_fc2.weight"),
    )


def last_tensors(sizes: ModelSizes) -> Iterator[TensorRow]:
    yield norm("model.norm.weight", sizes.hidden_size, "final_norm", None, "decoder.final_layernorm.weight")
    if not sizes.tied:
        yield TensorRow(
            name="lm_head.weight",
            shape=(sizes.vocab_size, sizes.hidden_size),
            op="lm_head",
            product=True,
            engine=Location("lm_head.weight", padded=True, split=0),
            megatron=Location("output_layer.weight"),
        )


def norm(name: str, size: int, op: str, layer: int | None, megatron: str) -> TensorRow:
    return TensorRow(name=name, shape=(size,), op=op, layer=layer, engine=Location(name), megatron=Location(megatron))


ARCHITECTURE = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    sizes=sizes,
    shape=shape,
    tensors=tensors,
    forward=forward,
    kinds=(*ATTENTION_KINDS, ("gate_proj", "up_proj"), ("down_proj",)),
)
