"""Sizes, tensors and ops of the made-up architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from models.architecture import Architecture
from models.architectures.qwen3 import (
    ATTENTION_OPS,
    FIRST_OPS,
    LAST_OPS,
    attention_tensors,
    embedding,
    last_tensors,
    norm,
    post_norm,
)
from models.architectures.qwen3_moe import MOE_OPS, moe_tensors, sizes
from models.sizes import ModelSizes
from models.tensors import TensorRow
from models.trace import Forward, Op

EXPERTS = "specialists"


def tensors(sizes: ModelSizes) -> Iterator[TensorRow]:
    yield embedding(sizes)
    for layer in range(sizes.layers):
        for row in attention_tensors(sizes, layer):
            yield _moved(row, f"decoder.layers.{layer}.self_attention.linear_proj") if row.op == "o_proj" else row
        yield norm(
            f"model.layers.{layer}.self_attn.out_norm.weight",
            sizes.hidden_size,
            "out_norm",
            layer,
            f"decoder.layers.{layer}.self_attention.linear_proj.norm.weight",
        )
        yield post_norm(sizes, layer, "pre_mlp_layernorm.weight")
        yield from moe_tensors(sizes, layer, EXPERTS)
    yield from last_tensors(sizes)


def forward(sizes: ModelSizes) -> Forward:
    *before, o_proj = ATTENTION_OPS
    attention = (
        *before,
        replace(o_proj, megatron="self_attention.linear_proj.proj"),
        Op("out_norm", "norm", ("x",), ("x",), "self_attn.out_norm", "self_attention.linear_proj.norm"),
    )
    return Forward(FIRST_OPS, ((*attention, *MOE_OPS),) * sizes.layers, LAST_OPS)


def _moved(row: TensorRow, module: str) -> TensorRow:
    return replace(row, megatron=replace(row.megatron, parameter=f"{module}.proj.weight"))


ARCHITECTURE = Architecture("MadeUpForCausalLM", "qwen3_moe", sizes, tensors, forward)
