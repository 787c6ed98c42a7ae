"""The made-up architecture in Megatron: a row-parallel product with a norm behind it."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from trainer.megatron.mapping import MegatronMapping
from trainer.modules.exact.norm import RMSNorm
from trainer.modules.precision import LayerPrecision


class ProjectionThenNorm(nn.Module):
    def __init__(self, *args: Any, projection: ModuleSpec, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__()
        self.proj = build_module(projection, *args, config=config, **kwargs)
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.norm(self.proj(x)[0]), None


def _with_norm(layer: ModuleSpec, precision: LayerPrecision) -> ModuleSpec:
    attention = layer.submodules.self_attention.submodules
    attention.linear_proj = ModuleSpec(module=ProjectionThenNorm, params={"projection": attention.linear_proj})
    return layer


MAPPING = MegatronMapping(config=lambda sizes: {"qk_layernorm": True}, layer=_with_norm)
