"""Matrix products in accumulators of FP8 kernels: FP32, Hopper's 13 bits, and 13 bits moved to FP32 in time."""

from __future__ import annotations

import torch
from torch import Tensor

INSTRUCTION_K = 32
"""Products along K that one FP8 instruction of Hopper adds before it rounds."""
PROMOTED_EVERY = 128
FP22_DROPPED_BITS = 10
"""Hopper's accumulator keeps 13 of FP32's 23 bits of mantissa (DeepSeek-V3's report, 3.3.2)."""


def in_fp32(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K] @ w [N, K]^T, added in FP32."""
    return x.float() @ w.float().t()


def in_fp22(x: Tensor, w: Tensor) -> Tensor:
    """The same in an accumulator of 13 bits, which is cut off after every 32 products.

    The products of one instruction are added exactly here; the hardware aligns and cuts them too, so this is the
    smallest error that such an accumulator makes.
    """
    total = x.new_zeros(x.shape[0], w.shape[0], dtype=torch.float32)
    for a, b in zip(x.float().split(INSTRUCTION_K, 1), w.float().split(INSTRUCTION_K, 1), strict=True):
        total += a @ b.t()
        total.view(torch.int32).bitwise_and_(-1 << FP22_DROPPED_BITS)
    return total


def promoted(x: Tensor, w: Tensor) -> Tensor:
    """`in_fp22` whose sum moves to FP32 after every 128 products, as DeepGEMM's and this project's kernels do."""
    parts = zip(x.split(PROMOTED_EVERY, 1), w.split(PROMOTED_EVERY, 1), strict=True)
    total = x.new_zeros(x.shape[0], w.shape[0], dtype=torch.float32)
    for a, b in parts:
        total += in_fp22(a, b)
    return total
