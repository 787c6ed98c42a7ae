"""Fake quantization of activations and gradients on the way into a GEMM: the values after storing them in FP8.

Same values as `quantize(x, spec).dequantize()`, without FP8 casts, which are slow on a CPU, for the case that every
step runs: BF16 rows in token groups whose scales are powers of two, rounded to nearest. Everything else takes the
general quantizer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fp8rl.numerics.backend.compiler import compilable
from fp8rl.numerics.quantize import fake_quantize
from fp8rl.numerics.rounding import group_amax, round_to_grid, scale_from_amax
from fp8rl.numerics.spec import Scale, TensorSpec


def fake_quantize_rows(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """x [T, K] quantized along K: the operand of fprop and dgrad. Returns [T, K] in `spec.dequantized_dtype`."""
    if not spec.quantized or x.numel() == 0:
        return x
    if _is_fast(x, spec) and x.shape[1] % spec.group == 0:
        return _of_groups(x.reshape(-1, spec.group), spec).view(x.shape)
    return fake_quantize(x, spec)


def fake_quantize_columns(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """x [T, K] quantized along the tokens: an operand of wgrad, which sums over them. Returns [T, K]."""
    if not spec.quantized or x.numel() == 0:
        return x
    if _is_fast(x, spec):
        tokens = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -tokens % spec.group))
        return _of_groups(padded.unflatten(0, (-1, spec.group)), spec).flatten(0, 1)[:tokens]
    return fake_quantize(x.t().contiguous(), spec).t()


def _is_fast(x: torch.Tensor, spec: TensorSpec) -> bool:
    grouped = spec.granularity == "token_group" and spec.rounding == "nearest"
    return grouped and spec.scale != "fp32" and x.dtype == torch.bfloat16


def _of_groups(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Groups lie along axis 1."""
    return _round(x, *_scales(x, 1, spec.dtype, spec.scale, spec.fixed), spec.dtype)


@compilable
def _scales(
    x: torch.Tensor, dim: int, dtype: torch.dtype, kind: Scale, fixed: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and its inverse, FP32, of each group of x along `dim`, which stays as 1.

    Apart from `_round`, because a compiler that fuses the two computes the scale anew for every element.
    """
    scale = scale_from_amax(group_amax(x, (dim,), fixed), dtype, kind, x.dtype)
    return scale, 1.0 / scale


@compilable
def _round(x: torch.Tensor, scale: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """BF16 x rounded to the FP8 grid under its scales, BF16."""
    return (round_to_grid(x.float() * scale, dtype) * scale_inv).to(x.dtype)
