"""The precision in which one model runs its GEMMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from numerics import ops
from numerics.config import NumericsConfig
from numerics.ops.linear import Backward
from numerics.spec import QuantSpec
from numerics.weight_cache import WeightCache


@dataclass
class Precision:
    """The trainer's side of a NumericsConfig. A live model changes its precision with `numerics`.

    Attributes:
        cache: the operands of the current weight version's products.
        layers: of the whole model.
    """

    numerics: NumericsConfig
    cache: WeightCache
    layers: int

    def of_layer(self, layer: int) -> LayerPrecision:
        """What the modules of layer 0 to `layers` - 1 share."""
        return LayerPrecision(self, layer)


@dataclass(frozen=True)
class LayerPrecision:
    """A model's precision as one layer sees it. Modules ask it in each forward, and so follow a change."""

    model: Precision
    layer: int

    @property
    def spec(self) -> QuantSpec:
        """What the layer's forward quantizes."""
        return self.model.numerics.trainer_spec.of_layer(self.layer, self.model.layers)

    @property
    def backward(self) -> Backward:
        """Precision of the gradient GEMMs of a quantized module."""
        numerics = self.model.numerics
        return "fp8" if numerics.trainer == "fp8" and numerics.spec.gradient.quantized else "bf16"

    @property
    def k_splits(self) -> int:
        """Slices of K in a row-parallel product on one rank."""
        return self.model.numerics.k_splits

    def quantizes(self, kind: str) -> bool:
        """Whether the GEMMs of this module kind run in FP8 now."""
        return self.spec.quantizes(kind)

    def operand(self, weight: Tensor) -> Any:
        """What a quantized weight [N, K] multiplies as."""
        return self.model.cache.operand(weight, self.spec.weight)

    def group_operand(self, weights: Sequence[Tensor] | Tensor) -> Any:
        """What the quantized weights of a layer's experts multiply as: of each, or of their stack."""
        return self.model.cache.group_operand(weights, self.spec.weight)

    def fp8_linear(self, x: Tensor, weight: Tensor, k_splits: int = 1) -> Tensor:
        """`ops.fp8_linear` of x [..., K] and weight [N, K]."""
        return ops.fp8_linear(x, weight, self.operand(weight), self.spec, self.backward, k_splits)
