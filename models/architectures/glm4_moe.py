"""GLM-4.5, GLM-4.5-Air and GLM-4.6: a sigmoid router with a bias for each expert, shared experts, dense first layers.

Attention is Qwen3's with biases on queries, keys and values, rotation of a part of each head, and norms of heads in the
larger models only. The draft layers behind the last one (multi-token prediction) are kept as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8rl.models import parts
from fp8rl.models.architecture import Architecture
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.shape import Shape
from fp8rl.models.sizes import ModelSizes, SigmoidRouter
from fp8rl.models.tensors import TensorRow
from fp8rl.models.trace import Forward

NORM_EPS = 1e-5


def sizes(config: ConfigFile) -> ModelSizes:
    """Absent keys have the defaults of transformers' Glm4MoeConfig."""
    config.refuse_variants({"hidden_act": "silu"}, rotary_part=True)
    heads, hidden = config.size("num_attention_heads", default=96), config.size("hidden_size", default=4096)
    head_dim = config.size("head_dim", default=max(1, hidden // heads))
    attention = parts.family_sizes(config, heads, config.size("num_key_value_heads", default=8), head_dim)
    attention |= {
        "rotary_dim": config.rotary_dim(head_dim, default=0.5),
        "norm_eps": config.number("rms_norm_eps", default=NORM_EPS),
    }
    expert_size = config.size("moe_intermediate_size", default=1408)
    experts, groups = config.size("n_routed_experts", default=128), config.size("n_group", default=1)
    kept, top_k = config.size("topk_group", default=1), config.size("num_experts_per_tok", default=8)
    dense = config.size("first_k_dense_replace", default=1)
    if dense >= attention["layers"]:
        expected = f"less than num_hidden_layers = {attention['layers']}"
        raise config.refusal("first_k_dense_replace", dense, expected)
    parts.check_groups(config, experts, groups, kept, top_k)
    return parts.checked(
        config,
        ModelSizes(
            **attention,
            ffn_size=config.size("intermediate_size", default=10944),
            experts=experts,
            top_k=top_k,
            expert_size=expert_size,
            dense_layers=dense,
            shared_size=config.size("n_shared_experts", default=1) * expert_size,
            renormalize=config.flag("norm_topk_prob", default=True),
            sigmoid_router=SigmoidRouter(
                groups=groups, kept_groups=kept, factor=config.number("routed_scaling_factor", default=1.0)
            ),
            head_norms="each" if config.flag("use_qk_norm", default=False) else None,
            qkv_bias=config.flag("attention_bias", default=False),
            draft_layers=config.count("num_nextn_predict_layers"),
        ),
    )


def shape(sizes: ModelSizes) -> Shape:
    return parts.shape(sizes, expert_bias=True)


def tensors(sizes: ModelSizes) -> Iterator[TensorRow]:
    yield parts.embedding(sizes)
    for layer in range(sizes.layers):
        yield from parts.attention_tensors(sizes, layer)
        if sizes.has_experts(layer):
            yield parts.post_norm(sizes, layer, "pre_mlp_layernorm.weight")
            yield from parts.moe_tensors(sizes, layer)
        else:
            yield parts.post_norm(sizes, layer, "mlp.linear_fc1.layer_norm_weight")
            yield from parts.dense_mlp_tensors(sizes, layer)
    yield from parts.last_tensors(sizes)


def forward(sizes: ModelSizes) -> Forward:
    attention = parts.attention_ops(sizes)
    layers = [
        attention + (parts.SHARED_MOE_OPS if sizes.has_experts(layer) else parts.DENSE_OPS)
        for layer in range(sizes.layers)
    ]
    return Forward(parts.FIRST_OPS, tuple(layers), parts.LAST_OPS)


ARCHITECTURE = Architecture(
    name="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    sizes=sizes,
    shape=shape,
    tensors=tensors,
    forward=forward,
    kinds=(*parts.ATTENTION_KINDS, *parts.DENSE_KINDS, *parts.EXPERT_KINDS),
    engine_extras=parts.CACHE_SCALES,
)
