"""Fake quantization of activations and gradients on the way into a GEMM: the values after storing them in FP8.

Same values as `quantize(x, spec).dequantize()`, without FP8 casts, which are slow on a CPU, for the case that every
step runs: BF16 rows in power-of-two token groups. Everything else takes the general quantizer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from numerics.compiler import compilable
from numerics.quantize import fake_quantize
from numerics.rounding import group_amax, round_to_grid, scale_from_amax
from numerics.spec import TensorSpec


def fake_quantize_rows(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """x [T, K] quantized along K: the operand of fprop and dgrad. Returns [T, K] in `spec.dequantized_dtype`."""
    if not spec.quantized or x.numel() == 0:
        return x
    if _is_fast(x, spec) and x.shape[1] % spec.group == 0:
        groups = x.reshape(-1, spec.group)
        return _round(groups, *_scales(groups, 1, spec.dtype), spec.dtype).view(x.shape)
    return fake_quantize(x, spec)


def fake_quantize_columns(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """x [T, K] quantized along the tokens: an operand of wgrad, which sums over them. Returns [T, K]."""
    if not spec.quantized or x.numel() == 0:
        return x
    if _is_fast(x, spec):
        tokens = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -tokens % spec.group))
        blocks = padded.unflatten(0, (-1, spec.group))
        return _round(blocks, *_scales(blocks, 1, spec.dtype), spec.dtype).flatten(0, 1)[:tokens]
    return fake_quantize(x.t().contiguous(), spec).t()


def _is_fast(x: torch.Tensor, spec: TensorSpec) -> bool:
    return x.dtype == torch.bfloat16 and spec.granularity == "token_group" and spec.scale == "pow2"


@compilable
def _scales(x: torch.Tensor, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and its inverse, FP32, of each group of x along `dim`, which stays as 1.

    Apart from `_round`, because a compiler that fuses the two computes the scale anew for every element.
    """
    scale = scale_from_amax(group_amax(x, (dim,)), dtype, True, x.dtype)
    return scale, 1.0 / scale


@compilable
def _round(x: torch.Tensor, scale: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """BF16 x rounded to the FP8 grid under its scales, BF16."""
    return (round_to_grid(x.float() * scale, dtype) * scale_inv).to(x.dtype)
