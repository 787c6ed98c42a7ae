"""The parts that decoders are put together from: their sizes, the tensors and ops of attention, MLPs and experts.

Which variant a model has, such as biases or norms of heads, stands in its sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fp8rl.models.config_file import ConfigFile
from fp8rl.models.forms import (
    ADD_NORM,
    ATTENTION,
    EMBED,
    EXPERTS,
    EXPERTS_AND_SHARED,
    HEAD_NORM,
    HEADS_NORM,
    LATENT_ATTENTION,
    LATENT_DOWN,
    LINEAR,
    LOGPROBS,
    NORM,
    QKV,
    ROPE,
    ROUTER,
    SIGMOID_TOPK,
    SWIGLU,
    TOPK,
)
from fp8rl.models.shape import Shape, WeightGroup, decoder, product, vector
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import Location, TensorRow
from fp8rl.models.trace import TOKENS, Op

ATTENTION_KINDS = (("q_proj", "k_proj", "v_proj"), ("o_proj",))
LATENT_KINDS = (("q_a_proj", "kv_a_proj"), ("q_b_proj",), ("kv_b_proj",), ("o_proj",))
DENSE_KINDS = (("gate_proj", "up_proj"), ("down_proj",))
EXPERT_KINDS = (("experts.gate_proj", "experts.up_proj"), ("experts.down_proj",))
"""Kinds of which one product reads several stand together."""
CACHE_SCALES = frozenset({"k_scale", "v_scale"})
"""What SGLang gives some models' attention, where they are quantized, for a cache in FP8, which nothing here uses."""


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


def check_groups(config: ConfigFile, experts: int, groups: int, kept: int, top_k: int) -> None:
    """Refuse groups that experts do not divide into, and fewer experts in the kept ones than a token takes."""
    if experts % groups or (groups > 1 and experts // groups < 2):
        expected = f"a divisor of n_routed_experts = {experts} that leaves two of them or more in a group"
        raise config.refusal("n_group", groups, expected)
    if kept > groups:
        raise config.refusal("topk_group", kept, f"at most n_group = {groups}")
    if top_k > experts // groups * kept:
        expected = f"at most {experts // groups * kept}, the experts of topk_group = {kept} groups"
        raise config.refusal("num_experts_per_tok", top_k, expected)


def shape(sizes: ModelSizes, expert_bias: bool = False) -> Shape:
    """The formula of a decoder with grouped queries."""
    cached = 2 * sizes.kv_heads * sizes.head_dim
    return decoder(sizes, attention_weights(sizes), cached=cached, expert_bias=expert_bias)


def attention_weights(sizes: ModelSizes) -> Iterator[WeightGroup]:
    """The products, biases and norms of grouped queries, of all layers."""
    hidden, head_dim, layers = sizes.hidden_size, sizes.head_dim, range(sizes.layers)
    pieces = (sizes.heads * head_dim, sizes.kv_heads * head_dim, sizes.kv_heads * head_dim)
    yield product("qkv", sum(pieces), hidden, layers, kind="q_proj", pieces=pieces)
    if sizes.qkv_bias:
        yield vector("qkv_bias", sum(pieces), layers, share="split", pieces=pieces)
    if sizes.head_norms is not None:
        yield from (vector(f"{name}_norm", width, layers) for name, width in _head_norms(sizes))
    yield product("o", hidden, sizes.heads * head_dim, layers, kind="o_proj")


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


def attention_ops(sizes: ModelSizes) -> tuple[Op, ...]:
    """The norm before the attention, and all that is inside it."""
    if sizes.head_norms is None:
        return tuple(op for op in ATTENTION_OPS if op.form is not HEAD_NORM)
    if sizes.head_norms == "together":
        return tuple(replace(op, form=HEADS_NORM) if op.form is HEAD_NORM else op for op in ATTENTION_OPS)
    return ATTENTION_OPS


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


MOE_OPS = (
    Op("post_norm", ADD_NORM, ("x", "residual"), ("x", "residual"), "post_attention_layernorm", "pre_mlp_layernorm"),
    Op("router", LINEAR, ("x",), ("logits",), "mlp.gate", "mlp.router"),
    Op("topk", TOPK, ("logits",), ("probs", "chosen"), "mlp.topk", "mlp.router"),
    Op("experts", EXPERTS, ("x", "probs", "chosen"), ("x",), "mlp.experts", "mlp"),
)

_SHARED = "mlp.shared_experts"
SHARED_MOE_OPS = (
    MOE_OPS[0],
    Op("shared_gate_up", LINEAR, ("x",), ("shared",), f"{_SHARED}.gate_up_proj", f"{_SHARED}.linear_fc1"),
    Op("shared_swiglu", SWIGLU, ("shared",), ("shared",), f"{_SHARED}.act_fn", f"{_SHARED}.linear_fc2"),
    Op("shared_down", LINEAR, ("shared",), ("shared",), f"{_SHARED}.down_proj", f"{_SHARED}.linear_fc2"),
    Op("router", ROUTER, ("x",), ("logits",), "mlp.gate", "mlp.router"),
    Op("topk", SIGMOID_TOPK, ("logits",), ("probs", "chosen"), "mlp.topk", "mlp.router"),
    Op("experts", EXPERTS_AND_SHARED, ("x", "probs", "chosen", "shared"), ("x",), "mlp.experts", "mlp"),
)
"""A sigmoid router, and experts that every token takes beside those that are chosen for it."""
SIGMOID_MOE_OPS = (SHARED_MOE_OPS[0], *SHARED_MOE_OPS[4:6], MOE_OPS[-1])
"""A sigmoid router without such experts."""


def latent_attention_ops(sizes: ModelSizes) -> tuple[Op, ...]:
    """The norm before latent attention, and all that is inside it."""
    inside, there = "self_attn.", "self_attention."
    first = Op("input_norm", ADD_NORM, ("x", "residual"), ("x", "residual"), "input_layernorm", "input_layernorm")
    if sizes.latent is not None and sizes.latent.q_rank:
        fused, up = f"{inside}fused_qkv_a_proj_with_mqa", f"{there}linear_q_up_proj"
        queries: tuple[Op, ...] = (
            Op("qkv_a", LATENT_DOWN, ("x",), ("q_row", "kv_row"), fused, "self_attention"),
            Op("q_a_norm", NORM, ("q_row",), ("q_row",), f"{inside}q_a_layernorm", up),
            Op("q_b", LINEAR, ("q_row",), ("q",), f"{inside}q_b_proj", up),
        )
    else:
        down = f"{there}linear_kv_down_proj"
        queries = (
            Op("q", LINEAR, ("x",), ("q",), f"{inside}q_proj", f"{there}linear_q_proj"),
            Op("kv_a", LINEAR, ("x",), ("kv_row",), f"{inside}kv_a_proj_with_mqa", down),
        )
    attended, last = f"{there}core_attention", ATTENTION_OPS[-1]
    return first, *queries, Op("attention", LATENT_ATTENTION, ("q", "kv_row"), ("x",), "self_attn", attended), last


def latent_attention_tensors(sizes: ModelSizes, layer: int) -> Iterator[TensorRow]:
    """The norm before latent attention, and all that is inside it."""
    latent = sizes.latent
    assert latent is not None
    hidden, name = sizes.hidden_size, f"model.layers.{layer}."
    inside, there = f"{name}self_attn.", f"decoder.layers.{layer}.self_attention."
    fused = f"{inside}fused_qkv_a_proj_with_mqa.weight" if latent.q_rank else f"{inside}kv_a_proj_with_mqa.weight"

    def product(name: str, kind: str, shape: tuple[int, int], op: str, engine: Location, megatron: str) -> TensorRow:
        return TensorRow(
            name=f"{inside}{name}.weight",
            shape=shape,
            op=op,
            layer=layer,
            kind=kind,
            product=True,
            engine=engine,
            megatron=Location(f"{there}{megatron}.weight"),
        )

    queries = sizes.heads * sizes.head_dim
    before = f"decoder.layers.{layer}.input_layernorm.weight"
    yield norm(f"{name}input_layernorm.weight", hidden, "input_norm", layer, before)
    if latent.q_rank:
        pair = Location(fused, together=True)
        yield product("q_a_proj", "q_a_proj", (latent.q_rank, hidden), "qkv_a", pair, "linear_q_down_proj")
    else:
        own = Location(f"{inside}q_proj.weight", split=0)
        yield product("q_proj", "q_b_proj", (queries, hidden), "q", own, "linear_q_proj")
        pair = Location(fused)
    rows = (latent.kv_rank + latent.rope_dim, hidden)
    down = "qkv_a" if latent.q_rank else "kv_a"
    yield product("kv_a_proj_with_mqa", "kv_a_proj", rows, down, pair, "linear_kv_down_proj")
    if latent.q_rank:
        up = f"{there}linear_q_up_proj"
        yield norm(f"{inside}q_a_layernorm.weight", latent.q_rank, "q_a_norm", layer, f"{up}.layer_norm_weight")
        own = Location(f"{inside}q_b_proj.weight", split=0)
        yield product("q_b_proj", "q_b_proj", (queries, latent.q_rank), "q_b", own, "linear_q_up_proj")
    up = f"{there}linear_kv_up_proj"
    yield norm(f"{inside}kv_a_layernorm.weight", latent.kv_rank, "attention", layer, f"{up}.layer_norm_weight")
    both = (sizes.heads * (sizes.plain_dim + latent.value_dim), latent.kv_rank)
    own = Location(f"{inside}kv_b_proj.weight", split=0)
    yield product("kv_b_proj", "kv_b_proj", both, "attention", own, "linear_kv_up_proj")
    own = Location(f"{inside}o_proj.weight", split=1)
    yield product("o_proj", "o_proj", (hidden, sizes.heads * latent.value_dim), "o_proj", own, "linear_proj")


def latent_attention_weights(sizes: ModelSizes) -> Iterator[WeightGroup]:
    """The products and norms of latent attention, of all layers."""
    latent = sizes.latent
    assert latent is not None
    hidden, heads, layers = sizes.hidden_size, sizes.heads, range(sizes.layers)
    if latent.q_rank:
        yield product("q_a", latent.q_rank, hidden, layers, kind="q_a_proj", share="replicated")
        yield vector("q_a_norm", latent.q_rank, layers)
    yield product("q_b", heads * sizes.head_dim, latent.q_rank or hidden, layers, kind="q_b_proj")
    yield product("kv_a", latent.kv_rank + latent.rope_dim, hidden, layers, kind="q_a_proj", share="replicated")
    yield vector("kv_a_norm", latent.kv_rank, layers)
    yield product("kv_b", heads * (sizes.plain_dim + latent.value_dim), latent.kv_rank, layers, kind="kv_b_proj")
    yield product("o", hidden, heads * latent.value_dim, layers, kind="o_proj")


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
    projections = (("q_proj", sizes.heads), ("k_proj", sizes.kv_heads), ("v_proj", sizes.kv_heads))
    yield norm(
        f"model.layers.{layer}.input_layernorm.weight",
        hidden,
        "input_norm",
        layer,
        f"decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight",
    )
    inside, there = f"model.layers.{layer}.self_attn.", f"decoder.layers.{layer}.self_attention."
    for name, heads in projections:
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
    if sizes.qkv_bias:
        for name, heads in projections:
            yield TensorRow(
                name=f"{inside}{name}.bias",
                shape=(heads * head_dim,),
                op="qkv",
                layer=layer,
                engine=Location(f"{inside}qkv_proj.bias", split=0),
                megatron=Location(f"{there}linear_qkv.bias", layout="heads"),
            )
    if sizes.head_norms is not None:
        held = "layernorm.norm.weight" if sizes.head_norms == "together" else "layernorm.weight"
        for name, width in _head_norms(sizes):
            yield norm(f"{inside}{name}_norm.weight", width, f"{name}_norm", layer, f"{there}{name}_{held}")
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


def _head_norms(sizes: ModelSizes) -> tuple[tuple[str, int], tuple[str, int]]:
    """The widths of the norms of queries and of keys."""
    if sizes.head_norms == "together":
        return ("q", sizes.heads * sizes.head_dim), ("k", sizes.kv_heads * sizes.head_dim)
    return ("q", sizes.head_dim), ("k", sizes.head_dim)


def post_norm(sizes: ModelSizes, layer: int, megatron: str) -> TensorRow:
    """The norm between attention and MLP; megatron: where the trainer holds it in the layer."""
    name = f"model.layers.{layer}.post_attention_layernorm.weight"
    return norm(name, sizes.hidden_size, "post_norm", layer, f"decoder.layers.{layer}.{megatron}")


def dense_mlp_tensors(sizes: ModelSizes, layer: int) -> Iterator[TensorRow]:
    yield from _mlp_tensors(layer, "mlp.", sizes.hidden_size, sizes.ffn_size)


def _mlp_tensors(layer: int, place: str, hidden: int, width: int, ops: str = "") -> Iterator[TensorRow]:
    """An MLP at `place` in its layer on both sides; ops: what the names of its ops begin with."""
    inside, there = f"model.layers.{layer}.{place}", f"decoder.layers.{layer}.{place}"
    for name in ("gate_proj", "up_proj"):
        yield TensorRow(
            name=f"{inside}{name}.weight",
            shape=(width, hidden),
            op=f"{ops}gate_up",
            layer=layer,
            kind=name,
            product=True,
            engine=Location(f"{inside}gate_up_proj.weight", split=0),
            megatron=Location(f"{there}linear_fc1.weight"),
        )
    yield TensorRow(
        name=f"{inside}down_proj.weight",
        shape=(hidden, width),
        op=f"{ops}down",
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


def moe_tensors(
    sizes: ModelSizes, layer: int, experts: str = "experts", router: torch.dtype | None = None
) -> Iterator[TensorRow]:
    """Router and experts of a layer, shared ones too; experts: their name in the checkpoint; router: what the engine
    holds its weight in, FP32 if it takes sigmoids."""
    inside, there = f"model.layers.{layer}.mlp.", f"decoder.layers.{layer}.mlp."
    hidden, width = sizes.hidden_size, sizes.expert_size
    yield TensorRow(
        name=f"{inside}gate.weight",
        shape=(sizes.experts, hidden),
        op="router",
        layer=layer,
        product=True,
        engine=Location(f"{inside}gate.weight"),
        megatron=Location(f"{there}router.weight"),
        served=router or (torch.float32 if sizes.sigmoid_router else torch.bfloat16),
    )
    if sizes.sigmoid_router:
        yield TensorRow(
            name=f"{inside}gate.e_score_correction_bias",
            shape=(sizes.experts,),
            op="topk",
            layer=layer,
            engine=Location(f"{inside}gate.e_score_correction_bias"),
            megatron=Location(f"{there}router.expert_bias", buffer=True),
            served=torch.float32,
        )
    for expert in range(sizes.experts):
        for name, size, held, fc in (
            ("gate_proj", (width, hidden), "w13_weight", "linear_fc1"),
            ("up_proj", (width, hidden), "w13_weight", "linear_fc1"),
            ("down_proj", (hidden, width), "w2_weight", "linear_fc2"),
        ):
            yield TensorRow(
                name=f"{inside}{experts}.{expert}.{name}.weight",
                shape=size,
                op="experts",
                layer=layer,
                expert=expert,
                kind=f"experts.{name}",
                product=True,
                engine=Location(f"{inside}experts.{held}", index=expert),
                megatron=Location(f"{there}experts.{fc}.weight{expert}"),
            )
    if sizes.shared_size:
        yield from _mlp_tensors(layer, f"{_SHARED}.", hidden, sizes.shared_size, "shared_")
