"""The precision in which one model runs its GEMMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.ops.linear import Backward
from fp8rl.numerics.spec import QuantSpec
from fp8rl.numerics.weight_cache import WeightCache
from fp8rl.trainer.modules.adapter import Adapter


@dataclass
class Precision:
    """The trainer's side of a NumericsConfig. A live model changes its precision with `numerics`.

    Attributes:
        cache: the operands of the current weight version's products.
        layers: of the whole model.
        bare: while the model computes without its adapters: the operands of the weights as they are.
    """

    numerics: NumericsConfig
    cache: WeightCache
    layers: int
    bare: WeightCache | None = None

    @property
    def weights(self) -> WeightCache:
        """The operands of what is computed now."""
        return self.cache if self.bare is None else self.bare

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
        return self.model.weights.operand(weight, self.spec.weight)

    def group_operand(self, weights: Sequence[Tensor] | Tensor) -> Any:
        """What the quantized weights of a layer's experts multiply as: of each, or of their stack."""
        return self.model.weights.group_operand(weights, self.spec.weight)

    def fp8_linear(self, x: Tensor, weight: Tensor, k_splits: int = 1, plus: Tensor | None = None) -> Tensor:
        """`ops.fp8_linear` of x [..., K] and weight [N, K]."""
        return ops.fp8_linear(x, weight, self.operand(weight), self.spec, self.backward, k_splits, plus)

    def product(
        self, kind: str, x: Tensor, weight: Tensor, adapter: Adapter | None = None, k_splits: int = 1
    ) -> Tensor:
        """The product of x [..., K] and weight [N, K], in FP8 where `kind` is, with the adapter that stands beside."""
        adapter = self.used(adapter)
        plus = adapter.term(x, k_splits) if adapter is not None else None
        if self.quantizes(kind):
            out = self.fp8_linear(x, weight, k_splits, plus)
        else:
            out = ops.linear(x, self.plain(weight), k_splits, plus)
        return out if adapter is None else adapter.reached(out, x)

    def plain(self, weight: Tensor) -> Tensor:
        """What an unquantized product takes of a parameter."""
        return self.model.weights.plain(weight)

    def used(self, adapter: Adapter | None) -> Adapter | None:
        """The adapter, unless the model computes without."""
        return None if self.model.bare is not None else adapter
