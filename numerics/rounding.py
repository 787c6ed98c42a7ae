"""Rounding to the FP8 grids and the scales that go before it. Elementwise, FP32 in and out, the same under a compiler.

The scale formula is TransformerEngine's `Float8BlockScaling`: scale = fp8_max / amax with IEEE division, optionally
rounded down to a power of two by clearing the mantissa; a block whose amax is 0 or infinite has scale 1. Where the
division overflows FP32, the scale is the largest finite value of the input's dtype.
"""

from __future__ import annotations

import torch

_EXPONENT = 0x7F800000

# dtype -> (largest finite value, bits of the mantissa, exponent of the smallest normal number)
_GRIDS = {torch.float8_e4m3fn: (448.0, 3, -6), torch.float8_e5m2: (57344.0, 2, -14)}


def fp8_max(dtype: torch.dtype) -> float:
    """Largest finite value of an FP8 dtype."""
    return _GRIDS[dtype][0]


def group_amax(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Largest |x| along `dims`, which stay as 1; NaN is left out, nothing but NaN gives 0. FP32 out."""
    wide = x.float()
    # `x == x` and not isnan(), for which a compiler leaves the vector registers: 1.4 against 0.2 ns per element.
    return torch.where(wide == wide, wide.abs(), 0.0).amax(dims, keepdim=True)


def scale_from_amax(
    amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool, input_dtype: torch.dtype
) -> torch.Tensor:
    """The factor that a block is multiplied with before the cast to FP8 `dtype`.

    amax: FP32, of what is held in `input_dtype`. FP32 out, in its shape.
    """
    # torch.div of two tensors is IEEE; `448 / amax` would be reciprocal() * 448, which rounds twice.
    scale = torch.div(torch.full_like(amax, fp8_max(dtype)), amax)
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, torch.finfo(input_dtype).max), scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    return torch.where((amax == 0) | torch.isinf(amax), torch.ones_like(scale), scale)


def round_to_grid(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values rounded to the nearest value of an FP8 dtype: ties to even, saturating, NaN kept. FP32 in and out.

    x holds BF16 numbers times powers of two, so at most 8 significant bits. Then with k = 23 - mantissa bits, x * 2^k
    is an even multiple of the grid's step at x, and FP32's own rounding in (x * 2^k + x) - x * 2^k rounds x to the
    grid. Below the smallest normal number the step is fixed, and adding 1.5 * 2^k times that number's power does the
    same.
    No casts and no bit operations, so that a compiler vectorizes all of it.
    """
    largest, mantissa_bits, smallest_exponent = _GRIDS[dtype]
    shift = 23 - mantissa_bits
    x = x.clamp(-largest, largest)
    far = x * 2.0**shift
    fixed = 1.5 * 2.0 ** (smallest_exponent + shift)
    return torch.where(x.abs() < 2.0**smallest_exponent, (x + fixed) - fixed, (far + x) - far)
