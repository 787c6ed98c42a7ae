"""Attention with an output gate in the engine: each head's query comes with a gate for the head's output."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp8rl.models.families.gated_attention import GATED_QKV, OUTPUT_GATE
from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.rollout.engine.plugin.families import EngineFamily, EngineSide, Hook, Probed
from fp8rl.rollout.engine.plugin.families.attention import rotary_embedding

_NEXT = "models.qwen3_next.Qwen3HybridAttentionDecoderLayer.self_attention"
_QWEN3_5 = "models.qwen3_5.Qwen3_5AttentionDecoderLayer.self_attention"
_ARGUMENTS = "positions hidden_states forward_batch"
_ROTARY = "layers.rotary_embedding.mrope.MRotaryEmbedding."
_ROPE = "positions query key fused_set_kv_buffer_arg"


def _hooks(numerics: NumericsConfig, cuda: bool) -> tuple[Hook, ...]:
    if numerics.mode == "exact":
        provides = (ops.linear, ops.sigmoid_gate)
        layers = tuple(Hook(layer, "replace", attention, _ARGUMENTS, provides) for layer in (_NEXT, _QWEN3_5))
        rotation = _ROTARY + ("forward_cuda" if cuda else "forward_native")
        return (*layers, Hook(rotation, "replace", text_rotary_embedding, _ROPE, (ops.rope,)))
    # In native mode on a CPU Qwen3.5 calls kernels for CPUs with AMX.
    return () if cuda else (Hook(_QWEN3_5, "replace", attention, _ARGUMENTS),)


def attention(self: Any, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Tensor:
    """`self_attention` of a layer. A token's position is one number, also in a model with three for images."""
    q, k, v, gate = split(self.qkv_proj(hidden_states)[0], self.num_heads, self.num_kv_heads, self.head_dim)
    q, k = (norm(x.flatten(0, 1)).view(len(x), -1) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
    q, k = self.rotary_emb(forward_batch.positions, q, k)
    out = self.attn(q, k, v.flatten(1), forward_batch)
    return self.o_proj(ops.sigmoid_gate(out, gate.flatten(1)))[0]


def text_rotary_embedding(
    self: Any, positions: Tensor, query: Tensor, key: Tensor, fused_set_kv_buffer_arg: Any = None
) -> tuple[Tensor, Tensor]:
    """Rotate text, positions [T], in a model whose image positions have three numbers."""
    return rotary_embedding(self, positions, query, key, None, fused_set_kv_buffer_arg)


def split(qkv: Tensor, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the product's output, which has each head's query followed by its gate, then keys, then values."""
    both, keys = 2 * heads * head_dim, kv_heads * head_dim
    queries, k, v = qkv.split((both, keys, keys), -1)
    q, gate = queries.unflatten(-1, (heads, 2, head_dim)).unbind(2)
    return q, *(each.unflatten(-1, (kv_heads, head_dim)) for each in (k, v)), gate


def _gated_qkv(engine: Probed, module: Any, x: Tensor) -> tuple[Tensor, ...]:
    q, k, v, gate = split(module(x)[0], engine.sizes.heads, engine.sizes.kv_heads, engine.sizes.head_dim)
    return q, gate.flatten(1), k, v


FAMILY = EngineFamily(
    sides={
        GATED_QKV: EngineSide(_gated_qkv),
        OUTPUT_GATE: EngineSide(lambda _, module, x, gate: (ops.sigmoid_gate(x, gate),)),
    },
    hooks=_hooks,
)
