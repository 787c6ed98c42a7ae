"""Keys and values of the trainer's attention in the format of the engine's cache, and what part of them saturates."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8rl.numerics.kv import CODES, KVFormat
from fp8rl.numerics.rounding import fp8_max
from fp8rl.trainer.modules.precision import LayerPrecision


class KVRounding:
    """The run's `KVFormat` in one attention. In FP8 it counts the numbers that saturate, where `count` asks for it."""

    def __init__(self, precision: LayerPrecision) -> None:
        self._precision = precision
        self.counts: Tensor | None = None
        """int64 [2]: numbers beyond the range, and all. Kept on the device, so that no forward waits for it."""
        self.real: Tensor | None = None
        """bool [b, s], the tokens of this forward that are no padding; None: nothing is counted."""

    @property
    def format(self) -> KVFormat:
        """The format now; a live model changes it with its numerics."""
        return self._precision.kv

    def keys(self, x: Tensor) -> Tensor:
        """Return `KVFormat.keys` of x [b, s, ...], or [s, ...] of rows end to end."""
        return self._counted(x, self.format.key_scale, self.format.keys(x))

    def values(self, x: Tensor) -> Tensor:
        """Return `KVFormat.values` of such x."""
        return self._counted(x, self.format.value_scale, self.format.values(x))

    def _counted(self, x: Tensor, scale: float, rounded: Tensor) -> Tensor:
        if self.format.quantized and self.real is not None:
            beyond = (x.detach().abs() > fp8_max(CODES) * scale).reshape(self.real.numel(), -1)
            real = self.real.reshape(-1, 1)
            both = torch.stack(((beyond & real).sum(), real.sum() * beyond.shape[1]))
            self.counts = both if self.counts is None else self.counts + both
        return rounded


def count(model: nn.Module, real: Tensor | None) -> None:
    """Count in the next forward, until this is called with None; a forward for a backward does not count."""
    for each in _rounding_of(model):
        each.real = real


def kv_saturated(model: nn.Module) -> float:
    """Return the part of all ranks' keys and values that saturated since the last call.

    All ranks call it, also those whose layers have no keys.
    """
    total = torch.zeros(2, dtype=torch.int64, device=next(model.parameters()).device)
    for each in _rounding_of(model):
        if each.counts is not None:
            total += each.counts
            each.counts = None
    dist.all_reduce(total)
    saturated, numbers = total.tolist()
    return float(saturated / max(numbers, 1))


def _rounding_of(model: nn.Module) -> Iterator[KVRounding]:
    for module in model.modules():
        if isinstance(kv := getattr(module, "kv", None), KVRounding):
            yield kv
