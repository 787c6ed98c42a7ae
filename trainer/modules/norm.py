"""RMSNorm as Megatron's layer_norm module."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from numerics import ops


class RMSNorm(nn.Module):
    """`ops.rms_norm` over the last axis.

    The weight carries Megatron's `sequence_parallel` tag: each tensor-parallel rank sees its part of the sequence, so
    their gradients have to be added. Megatron's own torch norm refuses sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return ops.rms_norm(x, self.weight, self.eps)


def norm_weight(config: TransformerConfig, size: int) -> nn.Parameter:
    """A weight of ones with the `sequence_parallel` tag."""
    weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device()))
    setattr(weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
    return weight
