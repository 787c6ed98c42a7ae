"""Keys and values of the trainer's attention in the format of the engine's cache, and what part of them saturates."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8rl.numerics.kv import CODES, KVFormat
from fp8rl.numerics.rounding import fp8_max


class KVRounding:
    """The `KVFormat` of one attention. In FP8 it counts the numbers that saturate."""

    def __init__(self, kv: KVFormat) -> None:
        self.format = kv
        self.counts: Tensor | None = None
        """int64 [2]: numbers beyond the range, and all. Kept on the device, so that no forward waits for it."""

    def keys(self, x: Tensor) -> Tensor:
        """Return `KVFormat.keys`."""
        return self._counted(x, self.format.key_scale, self.format.keys(x))

    def values(self, x: Tensor) -> Tensor:
        """Return `KVFormat.values`."""
        return self._counted(x, self.format.value_scale, self.format.values(x))

    def _counted(self, x: Tensor, scale: float, rounded: Tensor) -> Tensor:
        if self.format.quantized:
            beyond = (x.detach().abs() > fp8_max(CODES) * scale).sum()
            both = torch.stack((beyond, torch.full_like(beyond, x.numel())))
            self.counts = both if self.counts is None else self.counts + both
        return rounded


def with_kv_saturated(metrics: dict[str, float], model: nn.Module) -> dict[str, float]:
    """Add the part of all keys and values that saturated since the last call. All ranks call it.

    Metrics of a model whose keys and values are in BF16 stay as they are.
    """
    rounding = [each for each in _rounding_of(model) if each.format.quantized]
    if not rounding:
        return metrics
    counts = [each.counts for each in rounding if each.counts is not None]
    for each in rounding:
        each.counts = None
    device = next(model.parameters()).device
    total = torch.stack(counts).sum(0) if counts else torch.zeros(2, dtype=torch.int64, device=device)
    dist.all_reduce(total)
    saturated, numbers = total.tolist()
    return metrics | {"train/kv_saturated": saturated / max(numbers, 1)}


def _rounding_of(model: nn.Module) -> Iterator[KVRounding]:
    for module in model.modules():
        if isinstance(kv := getattr(module, "kv", None), KVRounding):
            yield kv
