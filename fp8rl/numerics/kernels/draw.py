"""Draws tokens (`numerics.ops.draw`) in one pass over the logits, with no noise in memory.

A program finds the best token in a block of one row's vocabulary, and torch compares the best tokens of the blocks. A
maximum has no order of reduction, so the cut into blocks changes no token.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from fp8rl.numerics import sampling
from fp8rl.numerics.kernels.arithmetic import INTERPRETED, dense_rows
from fp8rl.numerics.ops.draw import EXP2, LEAST, LOG2_E, ONE
from fp8rl.numerics.sampling import GREEDY

# The lowest logits that top-p, top-k and min-p leave: `numerics.ops.draw` in one launch, without a sort.
#
# Two sums decide whether the logits above a value are enough: their number and their weight. Both fall as the value
# rises. A program looks for the smallest such value among all 2^32 of FP32, 4 bits at a time: each pass over the row's
# logits answers for 16 values at once. Sums are of whole numbers, so their order does not matter.

_ONE, _LOG2_E, _LEAST = tl.constexpr(ONE), tl.constexpr(LOG2_E), tl.constexpr(LEAST)
_EXP2 = tl.constexpr(EXP2)
_DEGREE = tl.constexpr(len(EXP2) - 1)


def truncation_floors(logits: Tensor, temperatures: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    logits = dense_rows(logits)
    floors = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _floors_kernel[(len(logits),)](
            *(logits, temperatures.float().contiguous(), top_p.float().contiguous(), top_k.long().contiguous()),
            *(min_p.float().contiguous(), floors, logits.shape[1], logits.stride(0)),
            BLOCK=1024,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return floors


@triton.jit
def _floors_kernel(
    logits_ptr, temperatures_ptr, top_p_ptr, top_k_ptr, min_p_ptr, floors_ptr,
    vocabulary, stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    one = row + tl.arange(0, 1)
    logits_ptr += row * stride
    temperature = tl.load(temperatures_ptr + one)
    lane = tl.arange(0, BLOCK)
    largest = tl.full((1,), float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        largest = tl.maximum(largest, tl.max(_logits(logits_ptr, start + lane, vocabulary), 0))
    total = tl.zeros((1,), tl.int64)
    min_p = tl.load(min_p_ptr + one).to(tl.float64)
    least = min_p * tl.full((1,), 2.0**_ONE, tl.float64)
    lightest = tl.zeros((1,), tl.int64) + _key(largest)  # the key of the lowest logit that min-p keeps
    for start in range(0, vocabulary, BLOCK):
        x = _logits(logits_ptr, start + lane, vocabulary)
        weight = _weights(x, largest, temperature)
        inside = start + lane < vocabulary
        total += tl.sum(tl.where(inside, weight, 0), 0)
        kept = inside & (weight.to(tl.float64) >= least)
        lightest = tl.minimum(lightest, tl.min(tl.where(kept, _key(x), _key(largest)), 0))
    top_p, top_k = tl.load(top_p_ptr + one), tl.load(top_k_ptr + one)
    bound = tl.where(top_p >= 1.0, float("inf"), top_p.to(tl.float64) * total.to(tl.float64))
    top_k = tl.where((top_k < 1) | (top_k > vocabulary), vocabulary, top_k)
    lowest = tl.full((1,), -(1 << 31), tl.int64)
    for digit in tl.static_range(8):
        pivots = lowest + (tl.arange(0, 16) + 1).to(tl.int64) * (1 << (28 - 4 * digit)) - 1
        larger, heavier = tl.zeros((16,), tl.int64), tl.zeros((16,), tl.int64)
        for start in range(0, vocabulary, BLOCK):
            x = _logits(logits_ptr, start + lane, vocabulary)
            above = (_key(x)[None, :] > pivots[:, None]) & (start + lane < vocabulary)[None, :]
            larger += tl.sum(above.to(tl.int64), 1)
            heavier += tl.sum(tl.where(above, _weights(x, largest, temperature)[None, :], 0), 1)
        many = (larger >= top_k) | (heavier.to(tl.float64) >= bound)
        lowest += tl.sum(many.to(tl.int64), 0) * (1 << (28 - 4 * digit))
    lowest = tl.minimum(tl.maximum(lowest, lightest), _key(largest))
    floor = largest
    for start in range(0, vocabulary, BLOCK):
        x = _logits(logits_ptr, start + lane, vocabulary)
        kept = (start + lane < vocabulary) & (_key(x) >= lowest)
        floor = tl.minimum(floor, tl.min(tl.where(kept, x, float("inf")), 0))
    tl.store(floors_ptr + one, floor)


@triton.jit
def _logits(logits_ptr, index, vocabulary):
    """Load logits in FP32, with -inf in place of a NaN and behind the vocabulary's end."""
    x = tl.load(logits_ptr + index, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _key(x):
    """Map FP32 numbers that are no NaN to int64 numbers in the same order. Both zeros have the same number."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _weights(x, largest, temperature):
    """`numerics.ops.draw.weights` of one row's logits [N]; largest, temperature: FP32 [1]."""
    temperature = tl.zeros(x.shape, tl.float32) + temperature
    scaled = tl.div_rn(x, temperature).to(tl.float64)
    top = tl.div_rn(tl.zeros(x.shape, tl.float32) + largest, temperature).to(tl.float64)
    exponent = tl.where(x == largest, 0.0, (scaled - top) * tl.full(x.shape, _LOG2_E, tl.float64))
    exponent = tl.maximum(exponent, tl.full(x.shape, _LEAST, tl.float64))
    whole = tl.floor(exponent + 0.5)
    part = exponent - whole
    power = tl.full(x.shape, _EXP2[_DEGREE], tl.float64)
    for n in tl.static_range(_DEGREE):
        power = power * part + tl.full(x.shape, _EXP2[_DEGREE - 1 - n], tl.float64)
    return (power * tl.full(x.shape, 2.0**_ONE, tl.float64)).to(tl.int64) >> (-whole).to(tl.int64)


# A draw. Most of its work would be the logarithms of the noise in FP64. So all tokens of a block get an upper bound in
# FP32, and only the token with the largest bound gets its sum S. If no other bound reaches S, this token is the block's
# best. If one does (rarely with noise, often where greedy logits are equal), all tokens get their sums.
#
# No bound is too low. Let u = 1 - v be the noise's uniform number, and h the upper 32 of v's bits:
# - V = h 2^-32 + 2^-60, rounded, is at most v (1 + 2^-22), and v + 2^-24 from 1/16 on.
# - A is V + V^2/2 + V^3/3 + V^4/4 for V < 1/16, the first terms of -log(1 - V), else -log(1 + 2^-22 - V). Then A is at
#   least 0.06, and 2^-22 is more than V - v and the rounding of the difference. Each formula errs by less than 2^-18 A.
#   So A (1 - 2^-17) <= -log u.
# - N = -log(A (1 - 2^-17)) errs by 2^-22 of its value or of 1, and by a rounding. So noise <= N + 2^-17. (If h = 0, N
#   is 41 and the noise at most 37. Else |N| <= 23.)
# - Y = logit * (1 / temperature) has three roundings: y <= Y + 2^-22 |Y| + 2^-22, the last for subnormal numbers.
# - B = Y + N is rounded once more: y + noise <= B + 2^-16 + 2^-21 |B|, which grows with B.
# So a token whose B is below S - 2^-15 - 2^-20 |S| has a sum below S. If the largest bound is not within 1e30, a
# quotient may have overflowed, and all tokens get their sums.

_BLOCK = 4096
_GOLDEN, _GREEDY = tl.constexpr(sampling.GOLDEN), tl.constexpr(GREEDY)
_MIX_0, _MIX_1 = (tl.constexpr(factor) for factor in sampling.MIX)
_LARGEST = tl.constexpr(torch.finfo(torch.float64).max)
_LN_2, _LESS = tl.constexpr(math.log(2.0)), tl.constexpr(1.0 - 2.0**-17)


def draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    logits = dense_rows(logits)
    rows, vocabulary = logits.shape
    blocks = -(-vocabulary // _BLOCK)
    best = torch.empty(rows, blocks, dtype=torch.float64, device=logits.device)
    token = torch.empty(rows, blocks, dtype=torch.int64, device=logits.device)
    if rows:
        _draw_kernel[rows, blocks](
            *(logits, temperatures.float().contiguous(), seeds.contiguous(), positions.contiguous(), best, token),
            *(vocabulary, logits.stride(0)),
            BLOCK=_BLOCK,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return token.gather(-1, best.argmax(-1, keepdim=True)).squeeze(-1)  # of equal blocks the first


@triton.jit
def _draw_kernel(
    logits_ptr, temperatures_ptr, seeds_ptr, positions_ptr, best_ptr, token_ptr,
    vocabulary, stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    one = tl.arange(0, 1)
    seed, position = tl.load(seeds_ptr + row + one), tl.load(positions_ptr + row + one)
    temperature = tl.load(temperatures_ptr + row + one)
    key = _mix(_mix(seed + _GOLDEN) ^ _mix(position * _GOLDEN + 1))
    where = row * tl.num_programs(1) + tl.program_id(1)

    logits = tl.load(logits_ptr + index, mask=index < vocabulary, other=float("nan")).to(tl.float32)
    bounds = _bounds(logits * tl.div_rn(tl.full((1,), 1.0, tl.float32), temperature), _bits(key, index), seed)
    most = tl.max(bounds, 0)
    likely = tl.min(tl.where(bounds == most, index, vocabulary - 1), 0) + one
    best = _sums(logits_ptr, temperature, seed, key, likely, vocabulary)
    reached = (best - 2.0**-15 - tl.abs(best) * 2.0**-20).to(tl.float32)
    alone = (tl.sum((bounds >= reached).to(tl.int32), 0) == 1) & (tl.abs(most) < 1e30)
    if alone | (tl.max(logits, 0) == float("-inf")):  # truncation left no token: the first is taken
        tl.store(best_ptr + where + one, best)
        tl.store(token_ptr + where + one, likely.to(tl.int64))
    else:
        sums = _sums(logits_ptr, temperature, seed, key, index, vocabulary)
        tl.store(best_ptr + where, tl.max(sums, 0))
        tl.store(token_ptr + where, tl.program_id(1) * BLOCK + tl.argmax(sums, 0).to(tl.int64))


@triton.jit
def _bits(key, index):
    """The noise's pseudo-random bits, int64 [N], of these tokens."""
    return _mix(key + (index + 1).to(tl.int64) * _GOLDEN)


@triton.jit
def _bounds(y, bits, seed):
    """Return the bounds B, FP32 [N], of the sums of y and noise."""
    v = tl.fma((~bits >> 32).to(tl.uint32).to(tl.float32), 2.0**-32, 2.0**-60)
    series = tl.fma(tl.fma(tl.fma(v, _LESS / 4, _LESS / 3), v, _LESS / 2), v, _LESS) * v
    a = tl.where(v < 0.0625, series, _log2((1.0 + 2.0**-22) - v) * (-_LESS * _LN_2))
    return tl.fma(_log2(a), tl.where(seed == _GREEDY, 0.0, -_LN_2), y)


@triton.jit
def _log2(x):
    """log2 of FP32 x, a normal number. It errs by 2^-22 at most for x in (1/2, 2), else by 2^-22 of its value (PTX
    ISA, lg2.approx)."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


@triton.jit
def _sums(logits_ptr, temperature, seed, key, index, vocabulary):
    """Return the sums of logit / temperature and noise, FP64 [N], of these tokens."""
    y = tl.load(logits_ptr + index, mask=index < vocabulary, other=float("nan")).to(tl.float32)
    y = tl.div_rn(y, tl.zeros(index.shape, tl.float32) + temperature).to(tl.float64)
    uniform = (_shifted(_bits(key, index), 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    noise = tl.where(seed == _GREEDY, 0.0, -tl.log(-tl.log(uniform)))
    # A NaN, and what lies behind the vocabulary's end, is below everything, also below a logit of -inf.
    return tl.where(y == y, tl.minimum(tl.maximum(y, -_LARGEST), _LARGEST) + noise, float("-inf"))


@triton.jit
def _mix(x):
    """`numerics.sampling.mix`; products wrap around."""
    x = (x ^ _shifted(x, 30)) * _MIX_0
    x = (x ^ _shifted(x, 27)) * _MIX_1
    return x ^ _shifted(x, 31)


@triton.jit
def _shifted(x, BITS: tl.constexpr):
    """int64 x >> BITS with zeros shifted in."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)
