"""Quantized weights and what they dequantize to, computed once per weight version.

Optimizers and checkpoint loaders write weights in place without bumping torch's own version counter, so the version is
explicit: whoever changes the weights calls `advance`, and nothing of an older version is ever served.
"""

from __future__ import annotations

import torch

from numerics.quantize import QuantizedTensor, quantize
from numerics.spec import TensorSpec


class WeightCache:
    """The quantized weights of one model on one process."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self._entries: dict[tuple[torch.Tensor, TensorSpec], tuple[QuantizedTensor, torch.Tensor]] = {}

    def advance(self, version: int) -> None:
        """Announce that the weights are now those of `version`; everything cached is dropped."""
        self._entries.clear()
        self.version = version

    def weights(self) -> list[torch.Tensor]:
        """The weights that a forward has asked for at this version."""
        return [weight for weight, _ in self._entries]

    def quantized(self, weight: torch.Tensor, spec: TensorSpec) -> QuantizedTensor:
        """`quantize(weight, spec)` of this version."""
        return self._entry(weight, spec)[0]

    def dequantized(self, weight: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """weight [N, K] as the forward multiplies with it, in `spec.dequantized_dtype`."""
        return self._entry(weight, spec)[1]

    def _entry(self, weight: torch.Tensor, spec: TensorSpec) -> tuple[QuantizedTensor, torch.Tensor]:
        key = (weight, spec)
        if key not in self._entries:
            quantized = quantize(weight.detach(), spec)
            self._entries[key] = (quantized, quantized.dequantize())
        return self._entries[key]
