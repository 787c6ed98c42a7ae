"""How tensors must lie in memory for the kernels, which take the stride of rows and no other."""

from __future__ import annotations

import torch


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., C] itself where the C numbers of a row lie side by side, else a copy.

    Others reach an op as gradients: that of a sum is one number with strides of 0.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., C] -> [T, C] with dense rows, a view where the strides allow one."""
    return dense_rows(x).reshape(-1, x.shape[-1])
