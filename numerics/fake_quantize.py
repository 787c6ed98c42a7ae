"""Fake quantization of activations and gradients on the way into a GEMM: the values after storing them in FP8.

Same values as `quantize(x, spec).dequantize()`, without FP8 casts, which are slow on a CPU, for the case that every step
runs: BF16 rows in power-of-two token groups. Everything else takes the general quantizer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from numerics.compiler import compilable
from numerics.quantize import fake_quantize
from numerics.rounding import round_to_grid, scale_from_amax
from numerics.spec import TensorSpec


def fake_quantize_rows(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """x [T, K] quantized along K: the operand of fprop and dgrad. Returns [T, K] in `spec.dequantized_dtype`."""
    if not spec.quantized or x.numel() == 0:
        return x
    if _is_fast(x, spec) and x.shape[1] % spec.group == 0:
        return _fast_rows(x, spec.group, spec.dtype)
    return fake_quantize(x, spec)


def fake_quantize_columns(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """x [T, K] quantized along the tokens: an operand of wgrad, which sums over them. Returns [T, K]."""
    if not spec.quantized or x.numel() == 0:
        return x
    if _is_fast(x, spec):
        tokens = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -tokens % spec.group))
        return _fast_columns(padded, _column_amax(padded, spec.group), spec.group, spec.dtype)[:tokens]
    return fake_quantize(x.t().contiguous(), spec).t()


def _is_fast(x: torch.Tensor, spec: TensorSpec) -> bool:
    return x.dtype == torch.bfloat16 and spec.granularity == "token_group" and spec.scale == "pow2"


@compilable
def _fast_rows(x: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    groups = x.unflatten(1, (-1, group)).float()
    amax = groups.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1, keepdim=True)
    scale = scale_from_amax(amax, dtype, True)
    return (round_to_grid(groups * scale, dtype) * (1.0 / scale)).flatten(1).to(x.dtype)


@compilable
def _fast_columns(x: torch.Tensor, amax: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    groups = x.unflatten(0, (-1, group)).float()
    scale = scale_from_amax(amax, dtype, True)
    return (round_to_grid(groups * scale, dtype) * (1.0 / scale)).flatten(0, 1).to(x.dtype)


def _column_amax(x: torch.Tensor, group: int) -> torch.Tensor:
    """[T, K] -> FP32 [T / group, 1, K]. Magnitudes of BF16 order like their bits, and torch reduces int16 fast."""
    bits = (x.view(torch.int16) & 0x7FFF).unflatten(0, (-1, group))
    bits = torch.where(bits > 0x7F80, 0, bits)  # NaN is left out
    return bits.amax(1, keepdim=True).view(torch.bfloat16).float()
