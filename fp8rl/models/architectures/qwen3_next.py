"""Qwen3-Next: gated delta rules in three of four layers, gated attention in the fourth, experts in each.

A gate multiplies the output of the shared expert. Norms multiply by 1 + their weight, except the norm after the rule.
The draft layer (multi-token prediction, `mtp.`) is kept as it is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fp8rl.models.architecture import Architecture
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import gated_attention, gated_delta, mlp
from fp8rl.models.families.gated_delta import GatedDelta
from fp8rl.models.sizes import ModelSizes, family_sizes

LINEAR, FULL = "linear_attention", "full_attention"
VARIANTS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""The only supported values of these keys."""


def sizes(config: ConfigFile) -> ModelSizes:
    """Read the sizes. Absent keys have the defaults of transformers' Qwen3NextConfig."""
    renormalize = config.flag("norm_topk_prob", default=True)
    arguments = hybrid_sizes(config, joined=True) | expert_sizes(config, 512, 10)
    return ModelSizes(**arguments, renormalize=renormalize)


def hybrid_sizes(config: ConfigFile, joined: bool = False) -> dict[str, Any]:
    """Return all arguments of ModelSizes except the MLPs'. This model and its successors read them in the same way.
    joined: as in `GatedDelta`."""
    config.refuse_variants(VARIANTS, rotary_part=True, layers=(LINEAR, FULL), mrope=True)
    head_dim = config.size("head_dim", default=256)
    heads = config.size("num_attention_heads", default=16)
    arguments = family_sizes(config, heads, config.size("num_key_value_heads", default=2), head_dim)
    every = config.interval("full_attention_interval", "layer_types", LINEAR, FULL, arguments["layers"], default=4)
    key_heads = config.size("linear_num_key_heads", default=16)
    value_heads = config.size("linear_num_value_heads", default=32)
    if value_heads % key_heads:
        expected = f"a multiple of linear_num_key_heads = {key_heads}: each key serves equally many values"
        raise config.refusal("linear_num_value_heads", value_heads, expected)
    linear = GatedDelta(
        layers=tuple(layer for layer in range(arguments["layers"]) if (layer + 1) % every),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=config.size("linear_key_head_dim", default=128),
        value_dim=config.size("linear_value_head_dim", default=128),
        taps=config.size("linear_conv_kernel_dim", default=4),
        joined=joined,
    )
    changes = {"rotary_dim": config.rotary_dim(head_dim, default=0.25), "joined": 1, "zero_centered_norms": True}
    return arguments | changes | {"kept": ("mtp.",), "own": (linear,)}


def expert_sizes(config: ConfigFile, experts: int, top_k: int) -> dict[str, Any]:
    """Return the arguments of ModelSizes for routed experts and a gated shared expert. experts, top_k: defaults."""
    return {
        "experts": config.size("num_experts", default=experts),
        "top_k": config.size("num_experts_per_tok", default=top_k),
        "expert_size": config.size("moe_intermediate_size", default=512),
        "shared_size": config.size("shared_expert_intermediate_size", default=512),
        "shared_gate": True,
    }


def engine_config(config: dict[str, Any], sizes: ModelSizes) -> dict[str, Any]:
    """Add to the top of config.json the keys that SGLang reads there and transformers 5 has elsewhere or not at all."""
    linear = sizes.of(GatedDelta).layers
    every = next((layer + 1 for layer in range(sizes.layers) if layer not in linear), sizes.layers + 1)
    part = sizes.rotary_dim / sizes.head_dim
    return config | {"full_attention_interval": every, "rope_theta": sizes.rope_theta, "partial_rotary_factor": part}


GATED_ATTENTION = replace(gated_attention.FAMILY, within=lambda sizes, layer: layer not in sizes.of(GatedDelta).layers)
GATED_MOE = replace(
    mlp.MOE, kinds=(*mlp.MOE.kinds, *mlp.DENSE.kinds), tensors=partial(mlp.moe_tensors, shared="shared_expert")
)
"""The family of experts, with the name that these checkpoints have for the shared expert."""
ARCHITECTURE = Architecture(
    name="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    sizes=sizes,
    families=(gated_delta.JOINED, GATED_ATTENTION, GATED_MOE),
    engine_config=engine_config,
)
