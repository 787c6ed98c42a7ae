"""Defines the format of keys and values in the engine's cache and in the trainer's attention.

In FP8 a rotated key, a value, or an MLA row (key and value in one) is divided by a static scale and rounded to E4M3
once, when it is made. So an entry of the cache depends on its token alone, and a token's result does not depend on its
batch. The engine keeps the codes, and the trainer keeps the same numbers in BF16. Neither multiplies them by the scales
again: the scale of keys is a factor of the scores, and the scale of values is a factor of the result. Scales are powers
of two, so they change no rounding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.rounding import fp8_max

CODES = torch.float8_e4m3fn
REMEDY = "Start the engine with the run's numerics.kv, which sets --kv-cache-dtype."
"""The remedy in an error about an engine whose cache has another format."""


@dataclass(frozen=True)
class KVFormat:
    """The format in which a run keeps keys and values."""

    quantized: bool = False
    """True: keys and values are in E4M3. False: they are in BF16, and both scales are 1."""
    key_scale: float = 1.0
    """Keys are divided by this power of two before they are rounded. So are rows that are key and value in one."""
    value_scale: float = 1.0
    """Values are divided by this power of two before they are rounded."""

    @property
    def dtype(self) -> torch.dtype:
        return CODES if self.quantized else torch.bfloat16

    @property
    def dtype_name(self) -> str:
        """The dtype as reports of engines name it."""
        return str(self.dtype).removeprefix("torch.")

    def keys(self, x: Tensor) -> Tensor:
        """Return keys, or rows that are key and value in one, as attention reads them, in x's dtype.

        The gradient is the gradient of a division by the scale: it passes straight through the rounding.
        """
        return _Rounded.apply(x, self.key_scale) if self.quantized else x

    def values(self, x: Tensor) -> Tensor:
        """Round values as the cache does."""
        return _Rounded.apply(x, self.value_scale) if self.quantized else x

    def result(self, out: Tensor) -> Tensor:
        """Multiply `out`, the result of attention over `values`, by the scale of values."""
        return out if self.value_scale == 1.0 else out * self.value_scale

    def result_of_keys(self, out: Tensor) -> Tensor:
        """Multiply `out`, the result of attention over rows that are key and value in one, by the scale of keys."""
        return out if self.key_scale == 1.0 else out * self.key_scale


BF16_CACHE = KVFormat()


def entries(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the keys or values in these slots of a cache. FP8 codes are returned in `dtype`, which holds them exactly.

    Codes are looked up in pairs, which takes a fifteenth of the time of torch's cast on a CPU.
    """
    found = cache[slots]
    if cache.dtype != CODES:
        return found
    pairs = _pairs(found.device).index_select(0, found.view(torch.uint16).flatten().int())
    return pairs.view(torch.bfloat16).view(found.shape).to(dtype)


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """Return a table from the 16 bits of two neighbouring codes to their two numbers: int32, two BF16 in each."""
    codes = torch.arange(1 << 16, dtype=torch.int32, device=device).to(torch.uint16)
    return codes.view(CODES).to(torch.bfloat16).view(torch.int32)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        """x / scale to the nearest number of E4M3: ties to even, saturating, NaN kept."""
        ctx.scale = scale
        largest = fp8_max(CODES)
        return (x / scale).clamp(-largest, largest).to(CODES).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the division by the scale, straight through the rounding."""
        return grads[0] if ctx.scale == 1.0 else grads[0] / ctx.scale, None
