"""The made-up architecture in SGLang."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.models.qwen3_moe import Qwen3MoeAttention, Qwen3MoeForCausalLM
from torch import Tensor

from fp8rl.models import register
from fp8rl.models.families.attention import ATTENTION
from fp8rl.rollout.engine.plugin.families import EngineFamily, EngineSide, Probed, register_family, sides
from tests.support.made_up.definition import ARCHITECTURE, EXPERTS, GATED, PROJECTED

register(ARCHITECTURE)


class MadeUpAttention(Qwen3MoeAttention):
    head_gates: ReplicatedLinear
    out_norm: RMSNorm

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        gates, _ = self.head_gates(hidden_states)
        _, _, (q, k, v, _) = self.forward_prepare(positions, hidden_states, forward_batch)
        attended = self.attn(
            q, *(self.for_each_query(x.unflatten(-1, (-1, self.head_dim))) for x in (k, v)), forward_batch
        )
        return self.out_norm(self.o_proj(GATED.definition(attended, gates))[0])

    def for_each_query(self, heads: Tensor) -> Tensor:
        """[T, kv heads, D] -> [T, heads, D]"""
        return heads.repeat_interleave(self.num_heads // self.num_kv_heads, 1)


def gated(
    engine: Probed, module: MadeUpAttention, q: Tensor, k: Tensor, v: Tensor, gates: Tensor
) -> tuple[Tensor, ...]:
    keys, values = module.for_each_query(k), module.for_each_query(v)
    (attended,) = sides()[ATTENTION].run(engine, module.attn, q, keys, values)
    return (GATED.definition(attended, gates),)


register_family(EngineFamily(sides={GATED: EngineSide(gated, hooked=False)}))


class MadeUpForCausalLM(Qwen3MoeForCausalLM):
    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        projected = copy.deepcopy(config)
        projected.num_key_value_heads = getattr(config, PROJECTED)
        super().__init__(projected, *args, **kwargs)
        for index, layer in enumerate(self.model.layers):
            attention, heads = layer.self_attn, config.num_attention_heads
            attention.attn = RadixAttention(
                heads, attention.head_dim, attention.scaling, num_kv_heads=heads, layer_id=index
            )
            attention.__class__ = MadeUpAttention
            attention.head_gates = ReplicatedLinear(config.hidden_size, config.num_attention_heads, bias=False)
            attention.out_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        renamed = ((name.replace(f".{EXPERTS}.", ".experts."), tensor) for name, tensor in weights)
        return super().load_weights(renamed, *args, **kwargs)


EntryClass = MadeUpForCausalLM
