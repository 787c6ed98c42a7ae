"""RoPE and attention as Megatron's core attention."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from fp8rl.numerics import ops
from fp8rl.trainer.distributed.context import own_positions, shared_attention
from fp8rl.trainer.step.microbatches import PackedRows


class CoreAttention(nn.Module):
    """`ops.rope` on queries and keys, then causal `ops.attention`.

    The model is built without position embeddings: rows start at position 0 and are right-padded, so a token's
    position is its index, and padding is never a key of a real query. Rows that lie end to end bring their positions;
    of rows that context-parallel ranks share, S is this rank's part.
    """

    def __init__(
        self, *, rope_theta: float, rotary_dim: int | None = None, config: TransformerConfig, **unused: Any
    ) -> None:
        super().__init__()
        self.rope_theta, self.rotary_dim = rope_theta, rotary_dim
        self.scale, self.shared = config.kv_channels**-0.5, config.context_parallel_size > 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedRows | None = None,
        **unused: Any,
    ) -> Tensor:
        """Query [S, B, H, D], key and value [S, B, Hkv, D] -> [S, B, H * D]; of rows end to end [T, H, D] and
        [T, Hkv, D] -> [T, 1, H * D]"""
        if (rows := packed_seq_params) is not None:
            query, key = (self._turned(x[None], rows.positions[None])[0] for x in (query, key))
            return ops.packed_attention(query, key, value, rows.lengths, self.scale).flatten(1).unsqueeze(1)
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        if self.shared:
            group = parallel_state.get_context_parallel_group()
            own = own_positions(query.shape[1] * group.size(), group.rank(), group.size()).to(query.device)
            positions = own.expand(query.shape[:2])
            query, key = (self._turned(x, positions) for x in (query, key))
            return shared_attention(query, key, value, positions, self.scale, group).transpose(0, 1).flatten(2)
        out = ops.attention(self.rotated(query), self.rotated(key), value, _positions(query), self.scale)
        return out.transpose(0, 1).flatten(2)

    def rotated(self, x: Tensor) -> Tensor:
        """Queries or keys [B, S, heads, D], as the attention takes them."""
        return self._turned(x, _positions(x))

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        return ops.rope(x, positions, self.rope_theta, self.rotary_dim)


def _positions(x: Tensor) -> Tensor:
    """[B, S] of [B, S, ...]"""
    return torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
