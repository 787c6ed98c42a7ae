"""DeepSeek-V3 and R1, Kimi-K2 and Moonlight: latent attention, a sigmoid router, shared experts, dense first layers.

Kimi-K2 (384 experts in one group) and Moonlight-16B-A3B (no low-rank queries, no YaRN) are the same
architecture in other sizes. The draft layers after the last layer (multi-token prediction) are kept as they are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from fp8rl.models.architecture import Architecture
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import latent, mlp
from fp8rl.models.sizes import ModelSizes, family_sizes, sigmoid_router
from fp8rl.models.tensors import FP8_BLOCK

VARIANTS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_interleave": True,
}
"""The only supported values of these keys."""


def sizes(config: ConfigFile) -> ModelSizes:
    """Read the sizes. config.json must have every size."""
    if config.size("moe_layer_freq", default=1) != 1:
        raise config.refusal("moe_layer_freq", config.size("moe_layer_freq"), "1: experts in all layers but the first")
    return latent_sizes(config, config.size("first_k_dense_replace"), 2.5)


def latent_sizes(
    config: ConfigFile, dense: int, factor: float, indexer: bool = False, norm_eps: float = 1e-6
) -> ModelSizes:
    """Read the sizes of a model with latent attention and a sigmoid router, whose first `dense` layers are dense.

    factor, norm_eps: the defaults of `SigmoidRouter.factor` and of the norms' epsilon. indexer: True if an indexer may
    choose keys."""
    if indexer:
        config.refuse_variants(VARIANTS, scaled=True, layers=("deepseek_sparse_attention",))
    else:
        config.refuse_variants(VARIANTS | {"index_topk": None}, scaled=True)
    heads, expert_size = config.size("num_attention_heads"), config.size("moe_intermediate_size")
    rope, q_rank = config.size("qk_rope_head_dim"), config.size("q_lora_rank", if_null=0)
    top_k, experts = config.size("num_experts_per_tok"), config.size("n_routed_experts")
    groups, kept = config.size("n_group"), config.size("topk_group")
    if q_rank % FP8_BLOCK:  # SGLang joins the scales of both, too
        expected = f"a multiple of {FP8_BLOCK}, the quantization block: SGLang holds it and kv_a_proj as one weight"
        raise config.refusal("q_lora_rank", q_rank, expected, "Use a model with such a rank.")
    if rope % 2:
        raise config.refusal("qk_rope_head_dim", rope, "an even number: rotary embeddings turn pairs")
    router = sigmoid_router(config, experts, groups, kept, top_k, factor)
    family = family_sizes(config, heads, heads, config.size("qk_nope_head_dim") + rope, norm_eps)
    return ModelSizes(
        **family | {"rotary_dim": rope, "joined": 1},  # no keys and values of a head's own lie in a fused parameter
        ffn_size=config.size("intermediate_size"),
        experts=experts,
        top_k=top_k,
        expert_size=expert_size,
        dense_layers=dense,
        shared_size=config.count("n_shared_experts") * expert_size,
        renormalize=config.flag("norm_topk_prob", default=True),
        sigmoid_router=router,
        head_norms=None,
        draft_layers=config.count("num_nextn_predict_layers"),
        rope_scaling=config.rope_scaling("yarn"),
        own=(
            latent.Latent(
                q_rank=q_rank, kv_rank=config.size("kv_lora_rank"), rope_dim=rope, value_dim=config.size("v_head_dim")
            ),
        ),
    )


ROUTED = replace(mlp.MOE, tensors=partial(mlp.moe_tensors, router=torch.bfloat16))
"""The family of experts, with a router whose weight the engine holds in BF16."""
ARCHITECTURE = Architecture(
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    aliases=("kimi_k2",),
    sizes=sizes,
    families=(latent.FAMILY, mlp.DENSE, ROUTED),
)
