"""DeepSeek-V3's config.json, as far as bytes and FLOPs go: it can be calculated, nothing here trains or serves it."""

from __future__ import annotations

from collections.abc import Iterator

from models.architecture import Architecture
from models.config_file import ConfigFile
from models.shape import Shape, WeightGroup, decoder, product, vector
from models.sizes import Latent, ModelSizes


def sizes(config: ConfigFile) -> ModelSizes:
    """Every key has to be there."""
    if config.size("moe_layer_freq", default=1) != 1:
        raise config.refusal("moe_layer_freq", config.size("moe_layer_freq"), "1: experts in all layers but the first")
    heads, expert_size = config.size("num_attention_heads"), config.size("moe_intermediate_size")
    rope, layers = config.size("qk_rope_head_dim"), config.size("num_hidden_layers")
    dense, top_k, experts = (
        config.size(name) for name in ("first_k_dense_replace", "num_experts_per_tok", "n_routed_experts")
    )
    if dense >= layers:
        raise config.refusal("first_k_dense_replace", dense, f"less than num_hidden_layers = {layers}")
    if top_k > experts:
        raise config.refusal("num_experts_per_tok", top_k, f"at most n_routed_experts = {experts}")
    return ModelSizes(
        layers=layers,
        hidden_size=config.size("hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=config.size("qk_nope_head_dim") + rope,
        rotary_dim=rope,
        vocab_size=config.size("vocab_size"),
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        rope_theta=config.number("rope_theta", default=10000.0),
        max_positions=config.size("max_position_embeddings"),
        tied=config.flag("tie_word_embeddings", default=False),
        ffn_size=config.size("intermediate_size"),
        experts=experts,
        top_k=top_k,
        expert_size=expert_size,
        dense_layers=dense,
        shared_size=config.size("n_shared_experts") * expert_size,
        latent=Latent(
            q_rank=config.size("q_lora_rank"),
            kv_rank=config.size("kv_lora_rank"),
            rope_dim=rope,
            value_dim=config.size("v_head_dim"),
        ),
    )


def shape(sizes: ModelSizes) -> Shape:
    latent = sizes.latent
    assert latent is not None
    return decoder(
        sizes,
        _attention(sizes, latent),
        cached=latent.kv_rank + latent.rope_dim,
        value_dim=latent.value_dim,
        expert_bias=True,
        trained=False,
    )


def _attention(sizes: ModelSizes, latent: Latent) -> Iterator[WeightGroup]:
    """Queries, and keys with values, through a narrow row each; of all layers."""
    hidden, heads, layers = sizes.hidden_size, sizes.heads, range(sizes.layers)
    up = heads * (sizes.head_dim - latent.rope_dim + latent.value_dim)
    yield product("q_a", latent.q_rank, hidden, layers, kind="q_proj", share="replicated")
    yield product("q_b", heads * sizes.head_dim, latent.q_rank, layers, kind="q_proj")
    yield product("kv_a", latent.kv_rank + latent.rope_dim, hidden, layers, kind="q_proj", share="replicated")
    yield product("kv_b", up, latent.kv_rank, layers, kind="q_proj")
    yield vector("q_a_norm", latent.q_rank, layers)
    yield vector("kv_a_norm", latent.kv_rank, layers)
    yield product("o", hidden, heads * latent.value_dim, layers, kind="o_proj")


ARCHITECTURE = Architecture(name="DeepseekV3ForCausalLM", model_type="deepseek_v3", sizes=sizes, shape=shape)
