"""In which precision one model runs its GEMMs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from numerics import ops
from numerics.config import NumericsConfig
from numerics.ops.linear import Backward
from numerics.spec import QuantSpec
from numerics.weight_cache import WeightCache


@dataclass
class Precision:
    """The trainer's side of a NumericsConfig, shared by every module that multiplies.

    Modules ask it in each forward, so that a live model changes its precision with `numerics`.

    Attributes:
        cache: the dequantized weights of the current weight version.
    """

    numerics: NumericsConfig
    cache: WeightCache

    @property
    def spec(self) -> QuantSpec:
        """What the forward quantizes."""
        return self.numerics.trainer_spec

    @property
    def backward(self) -> Backward:
        """Precision of the gradient GEMMs of a quantized module."""
        return "fp8" if self.numerics.trainer == "fp8" and self.numerics.spec.gradient.quantized else "bf16"

    @property
    def k_splits(self) -> int:
        """Slices of K in a row-parallel product on one rank."""
        return self.numerics.k_splits

    def quantizes(self, kind: str) -> bool:
        """Whether the GEMMs of this module kind run in FP8 now."""
        return self.spec.quantizes(kind)

    def dequantized(self, weight: Tensor) -> Tensor:
        """What a quantized weight [N, K] multiplies as."""
        return self.cache.dequantized(weight, self.spec.weight)

    def fp8_linear(self, x: Tensor, weight: Tensor, k_splits: int = 1) -> Tensor:
        """`ops.fp8_linear` of x [..., K] and weight [N, K]."""
        return ops.fp8_linear(x, weight, self.dequantized(weight), self.spec, self.backward, k_splits)
