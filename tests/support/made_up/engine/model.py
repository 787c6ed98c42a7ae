"""The made-up architecture in SGLang."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.models.qwen3_moe import Qwen3MoeAttention, Qwen3MoeForCausalLM
from torch import Tensor

from fp8rl.models import register
from fp8rl.models.families.attention import ATTENTION
from fp8rl.rollout.plugin.families import EngineFamily, EngineSide, Probed, register_family, sides
from tests.support.made_up.definition import ARCHITECTURE, EXPERTS, GATED

register(ARCHITECTURE)


class MadeUpAttention(Qwen3MoeAttention):
    head_gates: ReplicatedLinear
    out_norm: RMSNorm

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        gates, _ = self.head_gates(hidden_states)
        _, _, (q, k, v, _) = self.forward_prepare(positions, hidden_states, forward_batch)
        attended = self.attn(q, k, v, forward_batch)
        return self.out_norm(self.o_proj(GATED.definition(attended, gates))[0])


def gated(
    engine: Probed, module: MadeUpAttention, q: Tensor, k: Tensor, v: Tensor, gates: Tensor
) -> tuple[Tensor, ...]:
    (attended,) = sides()[ATTENTION].run(engine, module.attn, q, k, v)
    return (GATED.definition(attended, gates),)


register_family(EngineFamily(sides={GATED: EngineSide(gated, hooked=False)}))


class MadeUpForCausalLM(Qwen3MoeForCausalLM):
    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for layer in self.model.layers:
            attention = layer.self_attn
            attention.__class__ = MadeUpAttention
            attention.head_gates = ReplicatedLinear(config.hidden_size, config.num_attention_heads, bias=False)
            attention.out_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        renamed = ((name.replace(f".{EXPERTS}.", ".experts."), tensor) for name, tensor in weights)
        return super().load_weights(renamed, *args, **kwargs)


EntryClass = MadeUpForCausalLM
