"""Sums, products and casts inside kernels: orders that Triton leaves to its layouts, roundings that its interpreter
gets wrong."""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter multiplies the bit patterns of BF16 numbers, and cuts them off where it should round.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def pairwise_sum(x, COUNT: tl.constexpr):
    """Sums over the last axis of x [R, COUNT], a power of two: neighbours first, then neighbouring pairs, and so on.

    `tl.sum` adds in the order of a layout, which changes with the width of the loads, and so with the input's dtype.
    """
    ROWS: tl.constexpr = x.shape[0]
    for step in tl.static_range(COUNT.bit_length() - 1):
        x = tl.sum(tl.reshape(x, (ROWS, COUNT >> (step + 1), 2)), 2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def dot(a, b, total):
    """total + a b on the tensor core; operands BF16, total FP32."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        return tl.dot(a, b, total)


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """FP32 x in DTYPE, BF16 or FP32, to nearest even."""
    if _INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def load(pointers, exists, MASKED: tl.constexpr):
    """What lies at `pointers`, 0 where it does not exist; without MASKED everything does."""
    if MASKED:
        return tl.load(pointers, mask=exists, other=0)
    else:
        return tl.load(pointers)
