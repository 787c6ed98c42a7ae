"""Sizes, formula, tensors and ops of the made-up architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from fp8rl.models.architectures import qwen3_moe
from fp8rl.models.forms import ATTENTION, LINEAR, NORM, OpForm
from fp8rl.models.parts import (
    ATTENTION_OPS,
    FIRST_OPS,
    LAST_OPS,
    MOE_OPS,
    attention_tensors,
    attention_weights,
    embedding,
    last_tensors,
    moe_tensors,
    norm,
    post_norm,
)
from fp8rl.models.shape import Shape, decoder, product, vector
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import Location, TensorRow
from fp8rl.models.trace import Forward, Op
from fp8rl.numerics.ops.router import sigmoid

EXPERTS = "specialists"


def gate_heads(x: Tensor, gates: Tensor) -> Tensor:
    """Attention x [..., heads * D], each head times the sigmoid of its gate [..., heads]: in FP32, rounded once."""
    heads = x.unflatten(-1, (gates.shape[-1], -1)).float()
    return (heads * sigmoid(gates.float()).unsqueeze(-1)).to(x.dtype).flatten(-2)


GATED = OpForm(
    name="gated_attention",
    shapes="q, k, v, gates [T, heads] -> [T, heads * D]",
    definition=gate_heads,
    part="attention",
)


def shape(sizes: ModelSizes) -> Shape:
    hidden, layers = sizes.hidden_size, range(sizes.layers)
    gates = product("gates", sizes.heads, hidden, layers, share="replicated")
    attention = (*attention_weights(sizes), gates, vector("out_norm", hidden, layers))
    return decoder(sizes, attention, cached=2 * sizes.kv_heads * sizes.head_dim)


def tensors(sizes: ModelSizes) -> Iterator[TensorRow]:
    yield embedding(sizes)
    for layer in range(sizes.layers):
        inside, there = f"model.layers.{layer}.self_attn.", f"decoder.layers.{layer}.self_attention."
        for row in attention_tensors(sizes, layer):
            yield _moved(row, f"{there}linear_proj") if row.op == "o_proj" else row
        yield TensorRow(
            name=f"{inside}head_gates.weight",
            shape=(sizes.heads, sizes.hidden_size),
            op="gates",
            layer=layer,
            product=True,
            engine=Location(f"{inside}head_gates.weight"),
            megatron=Location(f"{there}gates.weight"),
        )
        out_norm = f"{there}linear_proj.norm.weight"
        yield norm(f"{inside}out_norm.weight", sizes.hidden_size, "out_norm", layer, out_norm)
        yield post_norm(sizes, layer, "pre_mlp_layernorm.weight")
        yield from moe_tensors(sizes, layer, EXPERTS)
    yield from last_tensors(sizes)


def forward(sizes: ModelSizes) -> Forward:
    input_norm, qkv, *norms_and_rope, attention, o_proj = ATTENTION_OPS
    assert attention.form is ATTENTION
    ops = (
        input_norm,
        qkv,
        Op("gates", LINEAR, ("x",), ("gates",), "self_attn.head_gates", "self_attention.gates"),
        *norms_and_rope,
        replace(attention, form=GATED, reads=("q", "k", "v", "gates"), engine="self_attn"),
        replace(o_proj, megatron="self_attention.linear_proj.proj"),
        Op("out_norm", NORM, ("x",), ("x",), "self_attn.out_norm", "self_attention.linear_proj.norm"),
        *MOE_OPS,
    )
    return Forward(FIRST_OPS, (ops,) * sizes.layers, LAST_OPS)


def _moved(row: TensorRow, module: str) -> TensorRow:
    return replace(row, megatron=replace(row.megatron, parameter=f"{module}.proj.weight"))


ARCHITECTURE = replace(qwen3_moe.ARCHITECTURE, name="MadeUpForCausalLM", shape=shape, tensors=tensors, forward=forward)
