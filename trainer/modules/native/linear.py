"""Megatron's column- and row-parallel linear layers, with the local product in FP8 where the spec wants it."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from fp8rl.trainer.modules.precision import LayerPrecision
from fp8rl.trainer.modules.weights import norm_weight, tag_split


class ColumnLinear(ColumnParallelLinear):
    """Output features split over the tensor-parallel ranks."""

    def __init__(self, *args: Any, precision: LayerPrecision, kind: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision, self.kind = precision, kind
        tag_split(self.weight, 0)

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **context: Any) -> Tensor:
        if not self.precision.quantizes(self.kind):
            return super()._forward_impl(input, weight, *args, **context)
        if context["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(
                input, tensor_parallel_output_grad=True, group=context["tp_group"]
            )
        product = self.precision.fp8_linear(input, weight)
        return product if self.bias is None else product + self.bias


class NormColumnLinear(ColumnLinear):
    """RMSNorm, then a column-parallel product: TransformerEngine's LayerNormLinear, with its parameter names."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.layer_norm_weight = norm_weight(self.config, input_size)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] -> ([S, B, N] with the bias in it, None)"""
        return super().forward(self.normalized(input_), *args, **kwargs)

    def normalized(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], what the product takes."""
        weight = self.layer_norm_weight
        return F.rms_norm(x, weight.shape, weight, self.config.layernorm_epsilon)


class RowLinear(RowParallelLinear):
    """Input features split over the tensor-parallel ranks, whose products Megatron adds in the model's dtype."""

    def __init__(self, *args: Any, precision: LayerPrecision, kind: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision, self.kind = precision, kind
        tag_split(self.weight, 1)

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **context: Any) -> Tensor:
        if self.precision.quantizes(self.kind):
            return self.precision.fp8_linear(input, weight)
        return super()._forward_impl(input, weight, *args, **context)
