"""What Megatron's GPTModel has to be told of an architecture beside the sizes of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer import ModuleSpec

from models.sizes import ModelSizes
from trainer.modules.precision import LayerPrecision


@dataclass(frozen=True)
class MegatronMapping:
    """One architecture in Megatron.

    config: further keywords of TransformerConfig. layer: changes the layer that all architectures begin from
    (`trainer.modules.layer`), in one numerics mode as in the other.
    """

    config: Callable[[ModelSizes], dict[str, Any]] = lambda sizes: {}
    layer: Callable[[ModuleSpec, LayerPrecision], ModuleSpec] = lambda spec, precision: spec


_QWEN3 = MegatronMapping(config=lambda sizes: {"qk_layernorm": True})

MAPPINGS: dict[str, MegatronMapping] = {"Qwen3ForCausalLM": _QWEN3, "Qwen3MoeForCausalLM": _QWEN3}
"""By the name of the architecture."""
