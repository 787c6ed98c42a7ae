"""Facts of the conversions between FP32 and BF16, against values that are worked out from the bits in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp8rl.numerics import ops

Convert = Callable[[Tensor], Tensor]
"""FP32 to BF16."""

SAMPLES = 1 << 20
PATTERNS = 1 << 16
INFINITY = 0x7F80
"""The bits of infinity; larger ones, without the sign, are NaN, and those of subnormals are below 0x80."""
SMALLEST_NORMAL = 0x80


def facts(convert: Convert, seed: int) -> dict[str, float]:
    """Shares of values of which something holds, and sizes of BF16's grid.

    Tried are all BF16 values, all points half-way between two of them, and FP32 values with random bits.
    """
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.arange(PATTERNS)
    magnitudes = patterns & 0x7FFF
    values = _bf16(patterns)
    samples = torch.randint(0, 1 << 32, (SAMPLES,), generator=generator)
    below = patterns[magnitudes < INFINITY]
    halves = (below << 16) + 0x8000
    finite = torch.cat([halves, samples[(samples >> 16 & 0x7FFF) < INFINITY]])
    converted = _bits(convert(_fp32(finite)))
    expected = nearest(finite)
    nan = torch.cat([samples[(samples & 0x7FFFFFFF) > 0x7F800000], torch.tensor([0x7F800001, 0xFF80FFFF])])
    infinite, too_large = _fp32(torch.tensor([0x7F800000, 0xFF800000])), expected & 0x7FFF == INFINITY
    subnormal = values[(magnitudes > 0) & (magnitudes < SMALLEST_NORMAL)]
    exact = _value(magnitudes[:INFINITY])
    one = int(torch.tensor(1.0).bfloat16().view(torch.int16))
    return {
        "widened by zeros": _share(values.float().view(torch.int32) == (patterns << 16).to(torch.int32)),
        "rounded to nearest even": _share(converted == expected),
        "halves to even": _share((converted == expected)[: len(halves)]),
        "overflows to inf": _share((converted == expected)[too_large]),
        "NaN kept": _share(convert(_fp32(nan)).isnan()),
        "inf kept": _share(convert(infinite).float() == infinite),
        "subnormals lost": _share(convert(subnormal.float()) == 0),
        "subnormals lost in arithmetic": _share(subnormal * torch.ones_like(subnormal) == 0),
        "subnormals lost in products": _share(
            ops.linear(torch.eye(128).bfloat16(), _columns(subnormal)).t()[:, 0] == 0
        ),
        "largest over FP32's": float(exact[-1]) / torch.finfo(torch.float32).max,
        "smallest normal over FP32's": float(exact[SMALLEST_NORMAL]) / torch.finfo(torch.float32).smallest_normal,
        "stored bits": float(torch.tensor(float(((exact >= 1) & (exact < 2)).sum())).log2()),
        "spacing at 1": float(exact[one + 1] - exact[one]),
        "spacing below 1": float(exact[one] - exact[one - 1]),
        "FP32 spacing at 1": float(_fp32(torch.tensor([0x3F800001])).double() - 1),
    }


def nearest(fp32_bits: Tensor) -> Tensor:
    """The bits of the BF16 value nearest to finite FP32 values, given as bits; of two, the one with an even pattern."""
    sign, magnitude = fp32_bits >> 31 << 15, fp32_bits & 0x7FFFFFFF
    low = magnitude >> 16
    exact = _fp32(magnitude).double()
    down, up = exact - _value(low), _value(low + 1) - exact
    return sign + torch.where((up < down) | ((up == down) & (low % 2 == 1)), low + 1, low)


def _value(pattern: Tensor) -> Tensor:
    """What BF16 patterns without sign mean, in float64; infinity's is 2^128, at which rounding begins to overflow."""
    exponent, mantissa = pattern >> 7, (pattern & 0x7F).double()
    normal = torch.ldexp(mantissa + 128, exponent - 134)
    return torch.where(exponent > 0, normal, torch.ldexp(mantissa, torch.tensor(-133)))


def _fp32(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _bf16(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int16).long() & 0xFFFF


def _columns(values: Tensor) -> Tensor:
    """A weight [len(values), 128] whose first column is `values`."""
    return torch.cat([values[:, None], values.new_zeros(len(values), 127)], 1)


def _share(holds: Tensor) -> float:
    return float(holds.double().mean())
