"""Qwen3-MoE: Qwen3 with routed experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator

from fp8rl.models import parts
from fp8rl.models.architecture import Architecture
from fp8rl.models.architectures import qwen3
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow
from fp8rl.models.trace import Forward


def sizes(config: ConfigFile) -> ModelSizes:
    """Absent keys have the defaults of transformers' Qwen3MoeConfig."""
    config.refuse_variants(qwen3.VARIANTS | {"decoder_sparse_step": 1, "mlp_only_layers": []})
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    kv_heads = config.size("num_key_value_heads", default=4)
    attention = parts.family_sizes(config, heads, kv_heads, config.size("head_dim", default=max(1, hidden // heads)))
    return parts.checked(
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
    yield parts.embedding(sizes)
    for layer in range(sizes.layers):
        yield from parts.attention_tensors(sizes, layer)
        yield parts.post_norm(sizes, layer, "pre_mlp_layernorm.weight")
        yield from parts.moe_tensors(sizes, layer)
    yield from parts.last_tensors(sizes)


def forward(sizes: ModelSizes) -> Forward:
    layer = parts.attention_ops(sizes) + parts.MOE_OPS
    return Forward(parts.FIRST_OPS, (layer,) * sizes.layers, parts.LAST_OPS)


ARCHITECTURE = Architecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    sizes=sizes,
    shape=parts.shape,
    tensors=tensors,
    forward=forward,
    kinds=(*parts.ATTENTION_KINDS, *parts.EXPERT_KINDS),
)
