"""Stochastic rounding against an oracle in whole numbers, its mean, and what it may depend on."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.numerics.quantize import fake_quantize, fake_quantize_columns, fake_quantize_rows
from fp8rl.numerics.rounding import round_stochastically
from fp8rl.numerics.spec import TensorSpec

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SPEC = TensorSpec(rounding="stochastic")
WORD = 2**64 - 1


def splitmix64(x):
    """Steele, Lea and Flood 2014, in Python's integers."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


def oracle(x, column, dtype):
    """One number: the grid values around it in exact fractions, the upper one with the probability of its nearness."""
    grid = sorted(
        {abs(v) for v in torch.arange(256, dtype=torch.uint8).view(dtype).float().tolist() if math.isfinite(v)}
    )
    fraction_bits = {E4M3: 20, E5M2: 21}[dtype]
    exact = min(Fraction(abs(x)), Fraction(grid[-1]))
    low = max(value for value in grid if value <= exact)
    high = min((value for value in grid if value > low), default=low)
    share = 0 if high == low else (exact - Fraction(low)) / (Fraction(high) - Fraction(low))
    bits = torch.tensor(x).view(torch.int32).item()
    draw = splitmix64((bits * 128 + column % 128) * 0x9E3779B97F4A7C15 & WORD) >> 64 - fraction_bits
    up = math.floor(share * 2**fraction_bits) + draw >= 2**fraction_bits
    return math.copysign(high if up else low, x)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-600, 600, width=32) | st.floats(-(2.0**-5), 2.0**-5, width=32), min_size=1, max_size=40),
    st.integers(0, 10**6),
    st.sampled_from((E4M3, E5M2)),
)
def test_every_number_equals_the_oracle(numbers, first, dtype):
    columns = torch.arange(first, first + len(numbers))
    found = round_stochastically(torch.tensor(numbers), columns, dtype).tolist()
    assert found == [oracle(x, column, dtype) for x, column in zip(torch.tensor(numbers).tolist(), columns.tolist())]


@pytest.mark.parametrize("dtype", (E4M3, E5M2))
def test_numbers_of_the_grid_and_special_ones_stay(dtype):
    grid = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    grid = grid[grid.isfinite()]
    for first in (0, 77):
        assert torch.equal(round_stochastically(grid, torch.arange(first, first + len(grid)), dtype), grid)
    special = round_stochastically(torch.tensor([math.inf, -math.inf, math.nan, 1e9]), torch.arange(4), dtype)
    assert special[[0, 1, 3]].tolist() == [grid.max(), grid.min(), grid.max()] and special[2].isnan()


def test_the_mean_is_the_number_itself():
    """At each of the 16 places that BF16 knows between two E4M3 values: within 4 standard errors of its share."""
    bits = torch.arange(0x3C80, 0x43E0)[:, None]  # every BF16 number from 2^-6 to 448, in every column
    for sign in (0, -0x8000):
        x = (bits + sign).to(torch.int16).view(torch.bfloat16).float().expand(-1, 128).contiguous()
        up = round_stochastically(x, torch.arange(128), E4M3).abs() > x.abs()
        for place in range(16):
            drawn = up[place::16].double()
            share = place / 16
            assert abs(drawn.mean() - share) <= 4 * math.sqrt(share * (1 - share) / drawn.numel())


def test_it_depends_on_nothing_but_the_number_and_its_column():
    """So a token is the same in every batch, and a weight the same fused, and in the parts of tensor-parallel ranks."""
    x = torch.randn(300, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = fake_quantize(x, SPEC)
    assert torch.equal(fake_quantize(x[37:41], SPEC), whole[37:41])
    assert torch.equal(fake_quantize_rows(x[::7], SPEC), whole[::7])
    blocks = TensorSpec(granularity="block", rounding="stochastic")
    weight = fake_quantize(x[:256], blocks)
    assert torch.equal(torch.cat((fake_quantize(x[:128], blocks), fake_quantize(x[128:256], blocks))), weight)
    assert torch.equal(torch.cat([fake_quantize(part, blocks) for part in x[:256].split(128, 1)], 1), weight)
    assert torch.equal(fake_quantize_columns(x, SPEC), fake_quantize(x.t().contiguous(), SPEC).t())
