"""The core of latent attention on a CPU, where Megatron has none for keys and values of different widths."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class LatentCore(nn.Module):
    """torch's attention, causal; rows are right-padded."""

    def __init__(self, *, softmax_scale: float, **unused: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **unused: Any) -> Tensor:
        """Query and key [S, B, H, D], value [S, B, H, E] -> [S, B, H * E]"""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)
