"""Rotary position embedding (Su et al. 2021), in the rotate-half form of Llama and Qwen."""

from __future__ import annotations

import functools
from typing import Any

import torch

from numerics.backend.dispatch import op


@op
def rope(x: torch.Tensor, positions: torch.Tensor, theta: float, rotary_dim: int | None = None) -> torch.Tensor:
    """Rotate x [B, S, heads, D] by its positions int64 [B, S]. FP32 inside, rounded once to x's dtype.

    rotary_dim: the first channels of a head that are rotated; the others pass. None: all.
    """
    return _Rope.apply(x, positions, theta, rotary_dim or x.shape[-1])


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, positions: torch.Tensor, theta: float, rotary_dim: int) -> torch.Tensor:
        # Whole powers of two, so that few tables are ever made.
        length = 1 << max(10, int(positions.max()).bit_length()) if positions.numel() else 1
        table = _table(theta, rotary_dim, length, x.device)[:, positions].unsqueeze(-2)
        ctx.save_for_backward(table)
        return _rotate(x, table[0], table[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (table,) = ctx.saved_tensors
        return _rotate(grads[0], table[0], -table[1]), None, None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    size = 2 * cos.shape[-1]
    first, second = x[..., :size].float().chunk(2, -1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
    return rotated if size == x.shape[-1] else torch.cat((rotated, x[..., size:]), -1)


@functools.lru_cache(maxsize=8)
def _table(theta: float, rotary_dim: int, length: int, device: torch.device) -> torch.Tensor:
    """cos and sin, FP32 [2, length, rotary_dim / 2]."""
    frequencies = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin())).float().to(device)
