"""Tables of tensors for tests that need names rather than a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp8rl.models.architecture import Model
from fp8rl.models.architectures.qwen3_moe import ARCHITECTURE as QWEN3_MOE
from fp8rl.models.parts import (
    FIRST_OPS,
    LAST_OPS,
    attention_tensors,
    dense_mlp_tensors,
    embedding,
    last_tensors,
    moe_tensors,
)
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow
from fp8rl.models.trace import Forward

SIZES = ModelSizes(
    layers=4,
    hidden_size=256,
    heads=4,
    kv_heads=2,
    head_dim=128,
    rotary_dim=128,
    vocab_size=64,
    norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=512,
    tied=False,
    ffn_size=384,
    experts=12,
    top_k=2,
    expert_size=128,
)


def every_tensor(layers: int) -> Model:
    """A model whose layers have attention, experts and a dense MLP beside each other."""

    def rows(sizes: ModelSizes) -> Iterator[TensorRow]:
        yield embedding(sizes)
        for layer in range(sizes.layers):
            yield from attention_tensors(sizes, layer)
            yield from moe_tensors(sizes, layer)
            yield from dense_mlp_tensors(sizes, layer)
        yield from last_tensors(sizes)

    sizes = replace(SIZES, layers=layers)
    ops = Forward(FIRST_OPS, (), LAST_OPS)
    return Model(replace(QWEN3_MOE, name="EveryTensor", tensors=rows, forward=lambda _: ops), sizes)
