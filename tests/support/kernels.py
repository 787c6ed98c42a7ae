"""Where the kernels of these tests run, on the GPU at hand or in Triton's interpreter, and what they are given."""

from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# Hopper's FP8 instruction aligns what it adds to the largest addend and keeps about 14 bits; BF16 keeps almost FP32's.
FP8_BITS, BF16_BITS = (14, 22) if GPU else (24, 24)


def random(*shape, seed=0, scale=1.0, dtype=torch.bfloat16):
    """Normal numbers, the same on every device."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


def _in_order(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    # Cast before: einsum casts number by number, which takes it twenty times as long.
    a, b = (np.ascontiguousarray(x, dtype=dtype) for x in (a, b))
    return np.einsum("...ik,...kj->...ij", a, b)


_create_dot = InterpreterBuilder.create_dot


def _create_dot_in_order(*args: Any) -> Any:
    """Adds up every row in one order, as a GPU does. The interpreter leaves that to BLAS, where on some processors the
    order depends on where in a tile a row lies."""
    with mock.patch.object(np, "matmul", _in_order):
        return _create_dot(*args)


InterpreterBuilder.create_dot = _create_dot_in_order
