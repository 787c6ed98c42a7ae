"""In which precision one model runs its GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from numerics.config import NumericsConfig
from numerics.spec import QuantSpec
from numerics.weight_cache import WeightCache


@dataclass(frozen=True)
class Precision:
    """The trainer's side of a NumericsConfig, handed to every module that multiplies.

    Attributes:
        spec: what the forward quantizes.
        backward: precision of the gradient GEMMs of a quantized module.
        k_splits: slices of K in a row-parallel product on one rank.
        cache: the dequantized weights of the current weight version.
    """

    spec: QuantSpec
    backward: Literal["fp8", "bf16"]
    k_splits: int
    cache: WeightCache

    @classmethod
    def of(cls, numerics: NumericsConfig, cache: WeightCache) -> Precision:
        quantized_gradients = numerics.trainer == "fp8" and numerics.spec.gradient.quantized
        return cls(
            spec=numerics.trainer_spec,
            backward="fp8" if quantized_gradients else "bf16",
            k_splits=numerics.k_splits,
            cache=cache,
        )
