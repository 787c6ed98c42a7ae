"""Qwen3-MoE: Qwen3 with routed experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator

from models.architecture import Architecture
from models.architectures.qwen3 import (
    ATTENTION_KINDS,
    ATTENTION_OPS,
    FIRST_OPS,
    LAST_OPS,
    VARIANTS,
    attention_tensors,
    checked,
    embedding,
    family_sizes,
    last_tensors,
    post_norm,
    shape,
)
from models.config_file import ConfigFile
from models.forms import ADD_NORM, EXPERTS, LINEAR, TOPK
from models.sizes import ModelSizes
from models.tensors import Location, TensorRow
from models.trace import Forward, Op

EXPERT_KINDS = (("experts.gate_proj", "experts.up_proj"), ("experts.down_proj",))


def sizes(config: ConfigFile) -> ModelSizes:
    """Absent keys have the defaults of transformers' Qwen3MoeConfig."""
    config.refuse_variants(VARIANTS | {"decoder_sparse_step": 1, "mlp_only_layers": []})
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    kv_heads = config.size("num_key_value_heads", default=4)
    attention = family_sizes(config, heads, kv_heads, config.size("head_dim", default=max(1, hidden // heads)))
    return checked(
        config,
        ModelSizes(
            **attention,
            # transformers 5 writes the second spelling, older ones the first.
            experts=config.one_of("num_experts", "num_local_experts"),
            top_k=config.size("num_experts_per_tok"),
            expert_size=config.size("moe_intermediate_size"),
            renormalize=config.flag("norm_topk_prob", default=False),
        ),
    )


def tensors(sizes: ModelSizes) -> Iterator[TensorRow]:
    yield embedding(sizes)
    for layer in range(sizes.layers):
        yield from attention_tensors(sizes, layer)
        yield post_norm(sizes, layer, "pre_mlp_layernorm.weight")
        yield from moe_tensors(sizes, layer)
    yield from last_tensors(sizes)


def forward(sizes: ModelSizes) -> Forward:
    return Forward(FIRST_OPS, (ATTENTION_OPS + MOE_OPS,) * sizes.layers, LAST_OPS)


MOE_OPS = (
    Op("post_norm", ADD_NORM, ("x", "residual"), ("x", "residual"), "post_attention_layernorm", "pre_mlp_layernorm"),
    Op("router", LINEAR, ("x",), ("logits",), "mlp.gate", "mlp.router"),
    Op("topk", TOPK, ("logits",), ("probs", "chosen"), "mlp.topk", "mlp.router"),
    Op("experts", EXPERTS, ("x", "probs", "chosen"), ("x",), "mlp.experts", "mlp"),
)


def moe_tensors(sizes: ModelSizes, layer: int, experts: str = "experts") -> Iterator[TensorRow]:
    """Router and experts of a layer; experts: their name in the checkpoint."""
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


ARCHITECTURE = Architecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    sizes=sizes,
    shape=shape,
    tensors=tensors,
    forward=forward,
    kinds=(*ATTENTION_KINDS, *EXPERT_KINDS),
)
