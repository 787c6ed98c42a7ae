"""Gated attention in Megatron: its own output gate, with each head's gate next to its query, as in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from fp8rl.models.sizes import ModelSizes
from fp8rl.trainer.modules.families import MegatronFamily, attention


class GatedAttention(SelfAttention):
    """Megatron's attention with each gate next to its query. Megatron has a group's gates after all its queries."""

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """[S, B, H] -> q [S, B, heads, D], k and v [S, B, kv heads, D], and the gates of q"""
        mixed, _ = self.linear_qkv(hidden_states)
        grouped = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head))
        pairs, key, value = grouped.split((grouped.shape[-2] - 2, 1, 1), -2)
        query, gate = pairs.unflatten(-2, (-1, 2)).flatten(-4, -3).unbind(-2)
        return self.q_layernorm(query), self.k_layernorm(key.squeeze(-2)), value.squeeze(-2), gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Apply Megatron's formula of the gate, which Megatron would compile with torch."""
        return (x * torch.sigmoid(gate.float().reshape(x.shape))).to(x.dtype)


def _config(sizes: ModelSizes) -> Mapping[str, Any]:
    return {**attention.FAMILY.config(sizes), "attention_output_gate": True}


FAMILY = MegatronFamily(layer=lambda layer: attention.attention_fields(layer, GatedAttention), config=_config)
