"""A stand-in for TransformerEngine's Float8BlockwiseQTensor, which has no kernels for a CPU.

It has that class's attributes and memory layout (TransformerEngine 2.20.2), as far as the trainer reads them.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec


class DType(enum.IntEnum):
    """Of `transformer_engine.pytorch.constants`."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class BlockwiseWeight(nn.Parameter):
    """A weight [N, K] of whole blocks in FP8, which looks like a BF16 parameter."""

    def __new__(cls, values: Tensor, preset: str = "fp8_block_pow2") -> BlockwiseWeight:
        weight = super().__new__(cls, torch.full_like(values, torch.nan))  # nothing may read these
        weight._fp8_dtype, weight._is_2D_scaled = DType.kFloat8E4M3, True
        weight._quantizer = SimpleNamespace(force_pow_2_scales=preset == "fp8_block_pow2")
        weight._preset, weight._high_precision_init_val = preset, torch.empty(0)
        weight.quantize_(values)
        return weight

    def quantize_(self, values: Tensor) -> None:
        quantized = quantize(values, QuantSpec.preset(self._preset).weight)
        self._rowwise_data = quantized.data.view(torch.uint8)
        columns = quantized.scale_inv.shape[1]
        self._rowwise_scale_inv = F.pad(quantized.scale_inv, (0, -columns % 4), value=torch.nan)

    def get_high_precision_init_val(self) -> Tensor:
        return self._high_precision_init_val
