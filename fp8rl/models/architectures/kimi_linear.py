"""Kimi-Linear: Kimi Delta Attention, in one of four layers latent attention without rotation instead, and experts."""

from __future__ import annotations

from dataclasses import replace

from fp8rl.models.architecture import Architecture
from fp8rl.models.architectures import mixtral
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import kda, latent, mlp
from fp8rl.models.sizes import ModelSizes, SigmoidRouter, check_groups

VARIANTS = {
    "hidden_act": "silu",
    "mla_use_nope": True,
    "mla_use_output_gate": False,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "routed_expert_hidden_size": None,
    "attn_res_block_size": None,
    "num_nextn_predict_layers": 0,
}
"""The only values of these keys that the shared ops define."""


def sizes(config: ConfigFile) -> ModelSizes:
    """Read the sizes. config.json must have every size."""
    config.refuse_variants(VARIANTS)
    linear, layers, heads = (
        config.inner("linear_attn_config", ()),
        config.size("num_hidden_layers"),
        config.size("num_attention_heads"),
    )
    kinds = {name: linear.values.get(name) or [] for name in ("kda_layers", "full_attn_layers")}
    if sorted(layer for each in kinds.values() for layer in each) != list(range(1, layers + 1)):
        raise config.refusal("linear_attn_config", kinds, f"each layer from 1 to {layers} in one of both lists")
    rope, experts, groups = (
        config.size("qk_rope_head_dim"),
        config.size("num_experts"),
        config.size("num_expert_group", default=1),
    )
    kept, top_k, width = (
        config.size("topk_group", default=1),
        config.size("num_experts_per_token"),
        config.size("moe_intermediate_size"),
    )
    check_groups(config, experts, groups, kept, top_k)
    return ModelSizes(
        layers=layers,
        hidden_size=config.size("hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=config.size("qk_nope_head_dim") + rope,
        rotary_dim=rope,
        vocab_size=config.size("vocab_size"),
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        rope_theta=config.rope_theta(),
        max_positions=config.one_of("max_position_embeddings", "model_max_length"),
        tied=config.flag("tie_word_embeddings", default=False),
        ffn_size=config.size("intermediate_size"),
        experts=experts,
        top_k=top_k,
        expert_size=width,
        dense_layers=config.count("first_k_dense_replace"),
        shared_size=config.count("num_shared_experts") * width,
        renormalize=config.flag("moe_renormalize", default=True),
        sigmoid_router=SigmoidRouter(
            groups=groups, kept_groups=kept, factor=config.number("routed_scaling_factor", default=1.0)
        ),
        head_norms=None,
        own=(
            latent.Latent(
                q_rank=config.count("q_lora_rank"),
                kv_rank=config.size("kv_lora_rank"),
                rope_dim=rope,
                value_dim=config.size("v_head_dim"),
                rotated=False,
            ),
            kda.Kda(
                layers=tuple(layer - 1 for layer in kinds["kda_layers"]),
                heads=linear.size("num_heads"),
                head_dim=linear.size("head_dim"),
                taps=linear.size("short_conv_kernel_size"),
            ),
        ),
    )


LATENT = replace(latent.FAMILY, within=lambda sizes, layer: layer not in sizes.of(kda.Kda).layers)
ARCHITECTURE = Architecture(
    name="KimiLinearForCausalLM",
    model_type="kimi_linear",
    sizes=sizes,
    families=(kda.FAMILY, LATENT, mlp.DENSE, replace(mlp.MOE, tensors=mixtral.block_sparse_tensors)),
)
