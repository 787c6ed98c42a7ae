"""RoPE and attention as Megatron's core attention."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from numerics import ops


class CoreAttention(nn.Module):
    """`ops.rope` on queries and keys, then causal `ops.attention`.

    The model is built without position embeddings: rows start at position 0 and are right-padded, so a token's
    position is its index, and padding is never a key of a real query.
    """

    def __init__(self, *, rope_theta: float, config: TransformerConfig, **unused: Any) -> None:
        super().__init__()
        self.rope_theta = rope_theta
        self.scale = config.kv_channels**-0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **unused: Any
    ) -> Tensor:
        """Query [S, B, H, D], key and value [S, B, Hkv, D] -> [S, B, H * D]"""
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        positions = torch.arange(query.shape[1], device=query.device).expand(query.shape[0], -1)
        query = ops.rope(query, positions, self.rope_theta)
        key = ops.rope(key, positions, self.rope_theta)
        out = ops.attention(query, key, value, positions, self.scale)
        return out.transpose(0, 1).flatten(2)
