"""RMSNorm as Megatron's layer_norm module."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from fp8rl.trainer.modules.weights import norm_weight


class RMSNorm(nn.Module):
    """torch's RMSNorm over the last axis. Megatron's wrapper of it refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
