"""Parameters that TransformerEngine holds in FP8 (its Float8BlockwiseQTensor), with their codes and scales as they are.

Such a parameter looks like a BF16 tensor [N, K]. Inside are `_rowwise_data`, the codes as uint8 [N, K], and
`_rowwise_scale_inv`, FP32 [N / 128, K / 128 padded to a multiple of 4], besides transposed copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec

_FORMATS = {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2"}


def is_quantized(parameter: Tensor) -> bool:
    """Return True if TransformerEngine holds this parameter in FP8."""
    return hasattr(parameter, "_rowwise_scale_inv")


def quantized(parameter: Any) -> QuantizedTensor:
    """Return codes [N, K] and scales [N / 128, K / 128] of a parameter of whole blocks; they share its memory."""
    assert parameter._is_2D_scaled, "weights have one scale per block"
    spec = TensorSpec(
        format=_FORMATS[parameter._fp8_dtype.name],  # type: ignore[arg-type]
        granularity="block",
        scale="pow2" if parameter._quantizer.force_pow_2_scales else "fp32",
    )
    rows, columns = (size // spec.group for size in parameter.shape)
    codes = parameter._rowwise_data.view(spec.dtype).view(parameter.shape)
    return QuantizedTensor(codes, parameter._rowwise_scale_inv[:rows, :columns], spec)


@torch.no_grad()
def fill(parameter: Any, values: Tensor) -> None:
    """Quantize BF16 `values` [N, K] into the parameter, and leave them for the optimizer to make its master from."""
    parameter.quantize_(values)
    if hasattr(parameter, "get_high_precision_init_val"):
        # What it returns. TransformerEngine put there what it initialised the parameter with.
        parameter._high_precision_init_val = values.cpu()
