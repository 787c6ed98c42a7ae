"""Latent attention in native mode, by Megatron's modules. They compute the expanded form. Exact mode computes the
absorbed form (`numerics.ops.latent`), as the engine does over its cache.

Megatron splits the rows of the narrow products (`NARROW`) over tensor-parallel ranks. The parts would not be whole
quantization blocks. The products are small, so every rank computes whole products for its part of the sequence. With
TransformerEngine it is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from torch import Tensor, nn

from fp8rl.models.families.latent import Latent
from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics.ops.rope import Yarn
from fp8rl.trainer.modules.native import Fields, Layer, MegatronFamily, own_product
from fp8rl.trainer.modules.precision import LayerPrecision
from fp8rl.trainer.modules.weights import empty_weight

NARROW = {"linear_q_down_proj": "q_a_proj", "linear_kv_down_proj": "kv_a_proj"}
"""The products from the hidden size to the latent ranks, by Megatron's names, and their module kinds."""


class NarrowLinear(nn.Module):
    """A product with a weight that no ranks split. Every tensor-parallel rank computes it for its part of S."""

    def __init__(
        self, config: TransformerConfig, input_size: int, output_size: int, precision: LayerPrecision, kind: str
    ) -> None:
        super().__init__()
        self.precision, self.kind = precision, kind
        self.weight = empty_weight(config, output_size, input_size)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., K] -> ([..., N], no bias)"""
        own = own_product(self.precision, self.kind, x.device) or F.linear
        return own(x, self.weight), None


class WholeNarrow(MLASelfAttention):
    """Megatron's attention with `NarrowLinear` in place of its narrow products."""

    def __init__(self, *args: Any, precision: LayerPrecision, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, kind in NARROW.items():
            if (split := getattr(self, name, None)) is not None:
                setattr(self, name, NarrowLinear(self.config, split.input_size, split.output_size, precision, kind))


class ExpandedCore(nn.Module):
    """torch's causal attention over right-padded rows. It is for the CPU, where Megatron has no attention for keys and
    values of different widths."""

    def __init__(self, *, softmax_scale: float, **unused: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **unused: Any) -> Tensor:
        """query and key [S, B, H, D], value [S, B, H, E] -> [S, B, H * E]"""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def _fields(layer: Layer) -> Fields:
    """Return the fields of a layer. The norm after a narrow product is inside the product that follows it."""
    modules, te = layer.modules, layer.modules.provider
    narrow, core = (ColumnParallelLinear, ExpandedCore) if te is None else (te.linear(), te.core_attention())
    own = {"precision": layer.precision} if te is None else {}
    spec = ModuleSpec(
        module=WholeNarrow if te is None else MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, **own},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=modules.column_linear("q_b_proj"),
            linear_q_down_proj=narrow,
            linear_q_up_proj=modules.norm_column_linear("q_b_proj"),
            linear_kv_down_proj=narrow,
            linear_kv_up_proj=modules.norm_column_linear("kv_b_proj"),
            core_attention=core,
            linear_proj=modules.row_linear("o_proj"),
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )
    return {"input_layernorm": modules.norm, "self_attention": spec}


def _config(sizes: ModelSizes) -> Mapping[str, Any]:
    latent, yarn = sizes.of(Latent), sizes.rope_scaling
    rope: dict[str, Any] = {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    if isinstance(yarn, Yarn):
        rope = {
            "rope_type": "yarn",
            "rotary_scaling_factor": yarn.factor,
            "original_max_position_embeddings": yarn.original,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale,
        }
    return rope | {
        "apply_rope_fusion": False,  # of latent attention it is for YaRN alone, and experimental
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": sizes.plain_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rotary_base": sizes.rope_theta,
    }


FAMILIES = {
    "latent": MegatronFamily(
        layer=_fields,
        config=_config,
        config_type=MLATransformerConfig,
        formats=dict.fromkeys(("scores.output", "softmax.output"), "fp32"),  # as `ExpandedCore` computes
    )
}
