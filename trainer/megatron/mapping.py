"""What Megatron's GPTModel has to be told of an architecture beside the sizes of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer import ModuleSpec

from models.sizes import ModelSizes
from trainer.modules import layer as parts
from trainer.modules.heads_norm import HeadsNorm
from trainer.modules.layer import Fields, Layer, Router


@dataclass(frozen=True)
class MegatronMapping:
    """One architecture in Megatron: the parts of its layers, and what else TransformerConfig is to say.

    Attributes:
        attention, mlp: make their fields of a layer, a norm before it among them, in one numerics mode as in the other.
        router: makes what `mlp` puts in front of routed experts.
        config: further keywords of TransformerConfig.
    """

    attention: Callable[[Layer], Fields] = parts.attention
    mlp: Callable[[Layer, Router], Fields] = parts.mlp
    router: Callable[[Layer], ModuleSpec] = parts.router
    config: Callable[[ModelSizes], dict[str, Any]] = lambda sizes: {}


def _without_head_norms(layer: Layer) -> Fields:
    return {"self_attention": parts.attention_spec(layer, q_layernorm=None, k_layernorm=None)}


def _normed_over_all_heads(layer: Layer) -> Fields:
    def norm(heads: int) -> ModuleSpec:
        return ModuleSpec(module=HeadsNorm, params={"norm": layer.modules.norm, "heads": heads})

    own = parts.attention_spec(layer, q_layernorm=norm(layer.sizes.heads), k_layernorm=norm(layer.sizes.kv_heads))
    return {"self_attention": own}


_OLMOE = MegatronMapping(attention=_normed_over_all_heads, config=lambda sizes: {"qk_layernorm": True})
_QWEN2 = MegatronMapping(attention=_without_head_norms, config=lambda sizes: {"add_qkv_bias": True})
_QWEN3 = MegatronMapping(config=lambda sizes: {"qk_layernorm": True})

MAPPINGS: dict[str, MegatronMapping] = {
    "OlmoeForCausalLM": _OLMOE,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": _QWEN3,
}
"""The mappings by the name of the architecture."""
