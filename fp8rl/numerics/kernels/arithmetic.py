"""Defines sums, products and casts for kernels. The order of Triton's sums depends on layouts, and its interpreter
rounds some results wrong."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def pairwise_sum(x, COUNT: tl.constexpr):
    """Add up x [R, COUNT] over its last axis: neighbours first, then neighbouring pairs, and so on (COUNT = 2^n).

    `tl.sum` adds in the order of a layout, which changes with the width of the loads, and so with the input's dtype.
    """
    ROWS: tl.constexpr = x.shape[0]
    for step in tl.static_range(COUNT.bit_length() - 1):
        x = tl.sum(tl.reshape(x, (ROWS, COUNT >> (step + 1), 2)), 2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def dot(a, b, total):
    """total + a b on the tensor core; operands BF16, total FP32."""
    if INTERPRETED:  # which multiplies the bit patterns of BF16 numbers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        return tl.dot(a, b, total)


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """Round FP32 x to DTYPE, BF16 or FP32, to nearest even."""
    if INTERPRETED and DTYPE == tl.bfloat16:  # which it cuts off where it should round
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def load(pointers, exists, MASKED: tl.constexpr):
    """Load from `pointers`, with 0 for elements that do not exist. Without MASKED all elements exist."""
    if MASKED:
        return tl.load(pointers, mask=exists, other=0.0)
    else:
        return tl.load(pointers)


# Scales and rounding inside kernels: `numerics.rounding`, formula by formula.

GROUP = tl.constexpr(128)
"""Elements that share a scale along the quantized axis; the edge of a weight's block."""

_LARGEST_FP32 = tl.constexpr(torch.finfo(torch.float32).max)
_LARGEST_BF16 = tl.constexpr(torch.finfo(torch.bfloat16).max)


@triton.jit
def absolute(x):
    """|x| with NaN as 0, which leaves NaN out of an amax."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def scale_from_amax(amax, E5M2: tl.constexpr, POW2: tl.constexpr, FIXED: tl.constexpr, WIDE: tl.constexpr):
    """Return fp8_max / amax by IEEE division, or with POW2 rounded down to a power of two; 1 if amax is 0 or infinite.

    FIXED: a static range in place of amax, or None. WIDE: the input is FP32, not BF16.
    """
    if FIXED is not None:
        amax = tl.where(amax >= 0.0, FIXED, FIXED)
    LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
    usual = (amax != 0.0) & (amax != float("inf"))
    if POW2:
        # fp8_max is 1.75 * 2^n, and amax m * 2^e: the exponent is n - e, and one less where m > 1.75, which the sum
        # carries into e. 2^127 where the division would overflow.
        EXPONENTS: tl.constexpr = (127 + 15 if E5M2 else 127 + 8) + 127
        exponent = EXPONENTS - ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23)
        scale = (tl.minimum(exponent, 254) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(LARGEST, tl.where(usual, amax, LARGEST))
        scale = tl.where(scale == float("inf"), _LARGEST_FP32 if WIDE else _LARGEST_BF16, scale)
    return tl.where(usual, scale, 1.0)


@triton.jit
def inverse(scale, POW2: tl.constexpr):
    """1 / scale by IEEE division, or for a power of two by its exponent. 1 / 2^127 is subnormal."""
    if POW2:
        return tl.maximum(0x7F000000 - scale.to(tl.int32, bitcast=True), 0x400000).to(tl.float32, bitcast=True)
    else:
        return tl.div_rn(1.0, scale)


@triton.jit
def encode(y, E5M2: tl.constexpr):
    """Round FP32 y to FP8: to nearest even, saturating, NaN kept."""
    if INTERPRETED:  # which casts with ties away from zero, and loses carries and NaN
        return _encode_in_integers(y, E5M2)
    else:
        return y.to(tl.float8e5 if E5M2 else tl.float8e4nv)  # cvt.rn.satfinite


@triton.jit
def _encode_in_integers(y, E5M2: tl.constexpr):
    LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
    SMALLEST: tl.constexpr = -14 if E5M2 else -6
    BITS: tl.constexpr = 2 if E5M2 else 3
    magnitude = tl.where(y == y, tl.where(tl.abs(y) > LARGEST, LARGEST, tl.abs(y)), 0.0)
    exponent = tl.maximum((magnitude.to(tl.int32, bitcast=True) >> 23) - 127, SMALLEST)
    # In units of the grid's step at y; FP32 rounds a sum with 2^23 to whole ones, ties to even.
    units = magnitude * ((BITS + 127 - exponent) << 23).to(tl.float32, bitcast=True)
    units = ((units + 8388608.0) - 8388608.0).to(tl.int32)
    # A carry out of the mantissa runs into the exponent, and a number without leading bit has exponent field 0.
    code = units + ((exponent - SMALLEST) << BITS)
    code = tl.where(y == y, code, 127) | ((y.to(tl.int32, bitcast=True) >> 24) & 128)
    return code.to(tl.uint8).to(tl.float8e5 if E5M2 else tl.float8e4nv, bitcast=True)


# How tensors must lie in memory for the kernels, which take the stride of rows and no other.


def dense_rows(x: Tensor) -> Tensor:
    """Return x [..., C] itself if the C numbers of a row are contiguous, else a copy.

    Rows that are not contiguous reach an op as gradients: the gradient of a sum is one number with strides of 0.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """x [..., C] -> [T, C] with dense rows, a view where the strides allow one."""
    return dense_rows(x).reshape(-1, x.shape[-1])
