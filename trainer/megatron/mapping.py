"""What Megatron's GPTModel has to be told of an architecture beside the sizes of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer import ModuleSpec

from fp8rl.models.sizes import ModelSizes
from fp8rl.trainer.modules import layer as parts
from fp8rl.trainer.modules.layer import Fields, Layer, Router


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


USUAL = MegatronMapping()
MAPPINGS: dict[str, MegatronMapping] = {}
"""The mappings of architectures that Megatron has to be told more of than their sizes say, by name."""
