"""DeepSeek-V3 and R1, Kimi-K2 and Moonlight: latent attention, a sigmoid router, shared experts, dense first layers.

Kimi-K2 (384 experts in one group) and Moonlight-16B-A3B (queries without a narrow row, no YaRN) are sizes of it. The
draft layers behind the last one (multi-token prediction) are kept as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fp8rl.models import parts
from fp8rl.models.architecture import Architecture
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.shape import Shape, decoder
from fp8rl.models.sizes import Latent, ModelSizes, SigmoidRouter
from fp8rl.models.tensors import TensorRow
from fp8rl.models.trace import Forward

VARIANTS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_interleave": True,
    "index_topk": None,
}
"""The only values of these keys that the shared ops define; the last one belongs to sparse attention (V3.2)."""
BLOCK_OF_PAIR = 128
"""SGLang lays q_a_proj and kv_a_proj end to end, with the scales of both: the first has to be whole blocks."""


def sizes(config: ConfigFile) -> ModelSizes:
    """Every size has to be there."""
    if config.size("moe_layer_freq", default=1) != 1:
        raise config.refusal("moe_layer_freq", config.size("moe_layer_freq"), "1: experts in all layers but the first")
    return latent_sizes(config, config.size("first_k_dense_replace"), 2.5)


def latent_sizes(config: ConfigFile, dense: int, factor: float) -> ModelSizes:
    """Sizes of a model with latent attention and a sigmoid router, whose first layers are dense; factor: of the
    router's probabilities, where the file has none."""
    config.refuse_variants(VARIANTS, yarn=True)
    heads, expert_size = config.size("num_attention_heads"), config.size("moe_intermediate_size")
    rope, layers = config.size("qk_rope_head_dim"), config.size("num_hidden_layers")
    top_k, experts = config.size("num_experts_per_tok"), config.size("n_routed_experts")
    groups, kept = config.size("n_group"), config.size("topk_group")
    q_rank = config.size("q_lora_rank", if_null=0)
    if dense >= layers:
        raise config.refusal("first_k_dense_replace", dense, f"less than num_hidden_layers = {layers}")
    if top_k > experts:
        raise config.refusal("num_experts_per_tok", top_k, f"at most n_routed_experts = {experts}")
    if q_rank % BLOCK_OF_PAIR:
        expected = f"a multiple of {BLOCK_OF_PAIR}, the quantization block: SGLang holds it and kv_a_proj as one weight"
        raise config.refusal("q_lora_rank", q_rank, expected, "Use a model whose rank is one.")
    if rope % 2:
        raise config.refusal("qk_rope_head_dim", rope, "an even number: rotary embeddings turn pairs")
    parts.check_groups(config, experts, groups, kept, top_k)
    family = parts.family_sizes(config, heads, heads, config.size("qk_nope_head_dim") + rope)
    return ModelSizes(
        **family | {"rotary_dim": rope},
        ffn_size=config.size("intermediate_size"),
        experts=experts,
        top_k=top_k,
        expert_size=expert_size,
        dense_layers=dense,
        shared_size=config.count("n_shared_experts") * expert_size,
        renormalize=config.flag("norm_topk_prob", default=True),
        sigmoid_router=SigmoidRouter(
            groups=groups, kept_groups=kept, factor=config.number("routed_scaling_factor", default=factor)
        ),
        head_norms=None,
        draft_layers=config.count("num_nextn_predict_layers"),
        latent=Latent(
            q_rank=q_rank,
            kv_rank=config.size("kv_lora_rank"),
            rope_dim=rope,
            value_dim=config.size("v_head_dim"),
        ),
        yarn=config.yarn(),
    )


def shape(sizes: ModelSizes) -> Shape:
    latent = sizes.latent
    assert latent is not None
    return decoder(
        sizes,
        parts.latent_attention_weights(sizes),
        cached=latent.kv_rank + latent.rope_dim,
        value_dim=latent.value_dim,
        expert_bias=True,
    )


def tensors(sizes: ModelSizes, router: torch.dtype = torch.bfloat16) -> Iterator[TensorRow]:
    """router: what the engine holds a router's weight in."""
    yield parts.embedding(sizes)
    for layer in range(sizes.layers):
        yield from parts.latent_attention_tensors(sizes, layer)
        if sizes.has_experts(layer):
            yield parts.post_norm(sizes, layer, "pre_mlp_layernorm.weight")
            yield from parts.moe_tensors(sizes, layer, router=router)
        else:
            yield parts.post_norm(sizes, layer, "mlp.linear_fc1.layer_norm_weight")
            yield from parts.dense_mlp_tensors(sizes, layer)
    yield from parts.last_tensors(sizes)


def forward(sizes: ModelSizes) -> Forward:
    attention = parts.latent_attention_ops(sizes)
    sparse = parts.SHARED_MOE_OPS if sizes.shared_size else parts.SIGMOID_MOE_OPS
    layers = [attention + (sparse if sizes.has_experts(layer) else parts.DENSE_OPS) for layer in range(sizes.layers)]
    return Forward(parts.FIRST_OPS, tuple(layers), parts.LAST_OPS)


ARCHITECTURE = Architecture(
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    aliases=("kimi_k2",),
    sizes=sizes,
    shape=shape,
    tensors=tensors,
    forward=forward,
    kinds=(*parts.LATENT_KINDS, *parts.DENSE_KINDS, *parts.EXPERT_KINDS),
    engine_extras=parts.CACHE_SCALES,
)
