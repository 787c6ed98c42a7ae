"""The made-up architecture in SGLang."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.models.qwen3_moe import Qwen3MoeAttention, Qwen3MoeForCausalLM

from models import register
from tests.support.made_up.definition import ARCHITECTURE, EXPERTS

register(ARCHITECTURE)


class MadeUpAttention(Qwen3MoeAttention):
    out_norm: RMSNorm

    def forward_core(self, intermediate_state: Any) -> torch.Tensor:
        return self.out_norm(super().forward_core(intermediate_state))


class MadeUpForCausalLM(Qwen3MoeForCausalLM):
    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for layer in self.model.layers:
            layer.self_attn.__class__ = MadeUpAttention
            layer.self_attn.out_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        renamed = ((name.replace(f".{EXPERTS}.", ".experts."), tensor) for name, tensor in weights)
        return super().load_weights(renamed, *args, **kwargs)


EntryClass = MadeUpForCausalLM
