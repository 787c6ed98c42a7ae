"""Latent attention as Megatron has it, but for its narrow products, which every tensor-parallel rank computes whole.

Megatron splits the rows of these products over the ranks. The parts would not be whole quantization blocks, and the
products are small: each rank takes its own part of the sequence through all rows instead, as with TransformerEngine.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from fp8rl.trainer.modules.precision import LayerPrecision

NARROW = {"linear_q_down_proj": "q_a_proj", "linear_kv_down_proj": "kv_a_proj"}
"""Megatron's narrow products, and their module kinds."""


class NarrowLinear(nn.Module):
    """A product that is not split over the tensor-parallel ranks, each of which sees its part of the sequence."""

    def __init__(
        self, config: TransformerConfig, input_size: int, output_size: int, precision: LayerPrecision, kind: str
    ) -> None:
        super().__init__()
        self.precision, self.kind = precision, kind
        empty = torch.empty(output_size, input_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = nn.Parameter(empty)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., K] -> ([..., N], no bias)"""
        quantized = self.precision.quantizes(self.kind)
        if quantized:
            return self.precision.fp8_linear(x, self.weight), None
        return nn.functional.linear(x, self.weight), None


class LatentAttention(MLASelfAttention):
    """Megatron's attention with `narrow` in place of its narrow products."""

    def __init__(
        self, *args: Any, precision: LayerPrecision, narrow: type[NarrowLinear] = NarrowLinear, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        for name, kind in NARROW.items():
            if (split := getattr(self, name, None)) is not None:
                setattr(self, name, narrow(self.config, split.input_size, split.output_size, precision, kind))
