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
        return _fast_groups(x.reshape(-1, spec.group), spec.dtype).view(x.shape)
    return fake_quantize(x, spec)


def fake_quantize_columns(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """x [T, K] quantized along the tokens: an operand of wgrad, which sums over them. Returns [T, K]."""
    if not spec.quantized or x.numel() == 0:
        return x
    if _is_fast(x, spec):
        tokens = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -tokens % spec.group))
        blocks = padded.unflatten(0, (-1, spec.group))
        scale = scale_from_amax(_column_amax(blocks), spec.dtype, True)
        return _fast_columns(blocks, scale, 1.0 / scale, spec.dtype).flatten(0, 1)[:tokens]
    return fake_quantize(x.t().contiguous(), spec).t()


def _is_fast(x: torch.Tensor, spec: TensorSpec) -> bool:
    return x.dtype == torch.bfloat16 and spec.granularity == "token_group" and spec.scale == "pow2"


@compilable
def _fast_groups(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each row of BF16 [groups, group] with a scale of its own."""
    wide = x.float()
    scale = scale_from_amax(_magnitude(wide).amax(-1, keepdim=True), dtype, True)
    return (round_to_grid(wide * scale, dtype) * (1.0 / scale)).to(x.dtype)


@compilable
def _column_amax(blocks: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each column of each block: [blocks, group, K] -> FP32 [blocks, 1, K]."""
    return _magnitude(blocks.float()).amax(1, keepdim=True)


@compilable
def _fast_columns(
    blocks: torch.Tensor, scale: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """BF16 [blocks, group, K] rounded under the scales FP32 [blocks, 1, K] of its columns."""
    return (round_to_grid(blocks.float() * scale, dtype) * scale_inv).to(blocks.dtype)


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), 0.0, x.abs())
