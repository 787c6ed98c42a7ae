"""The kernels of the draw and of its truncation against the torch ops: the same tokens and floors, in few launches."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from fp8rl.numerics import ops
from fp8rl.numerics.kernels.draw import _bounds, draw, truncation_floors
from fp8rl.numerics.sampling import GREEDY, shifted
from tests.support.kernels import DEVICE

# The interpreter's numpy warns of NaN and of products that wrap around.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")


def case(rows, vocabulary, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows * vocabulary)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype)
    temperatures = torch.rand(rows, generator=generator) + 0.3
    temperatures[1::5] = math.inf
    seeds = torch.randint(0, 2**62, (rows,), generator=generator)
    seeds[::5] = GREEDY
    positions = torch.randint(0, 2**20, (rows,), generator=generator)
    return [value.to(DEVICE) for value in (logits, temperatures, seeds, positions)]


# Less than a block, several blocks, a whole number of them.
@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", (1, 300, 9001, 8192))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
def test_tokens_are_those_of_the_definition(vocabulary, dtype):
    arguments = case(11, vocabulary, dtype)
    assert draw(*arguments).equal(ops.draw(*arguments))
    strided = torch.zeros(11, vocabulary + 5, dtype=dtype, device=DEVICE)[:, 2 : vocabulary + 2].copy_(arguments[0])
    assert draw(strided, *arguments[1:]).equal(ops.draw(*arguments))


def test_ties_go_to_the_lower_id_also_in_another_block():
    logits = torch.full((2, 9000), -1.0, device=DEVICE)
    logits[:, (17, 4095, 4096, 8999)] = 2.0
    greedy = torch.full((2,), GREEDY, device=DEVICE)
    assert draw(logits, torch.ones(2, device=DEVICE), greedy, torch.zeros_like(greedy)).tolist() == [17, 17]
    # NaN is never drawn, nor minus infinity where there is another.
    logits = torch.full((4, 5000), -torch.inf, device=DEVICE)
    logits[0, ::2], logits[0, 4999] = math.nan, 1.0
    logits[1, :4998], logits[1, 4998] = math.nan, -3e38
    logits[2] = math.nan
    logits[3, 4097], logits[3, 3] = torch.inf, 5.0
    arguments = [torch.full((4,), 0.5), torch.tensor([4, 5, 6, 7]), torch.arange(4)]
    arguments = [logits, *(value.to(DEVICE) for value in arguments)]
    assert draw(*arguments).tolist() == ops.draw(*arguments).tolist() == [4999, 4998, 0, 4097]


@triton.jit
def _bounds_kernel(y_ptr, bits_ptr, seed_ptr, bounds_ptr, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    bounds = _bounds(tl.load(y_ptr + at), tl.load(bits_ptr + at), tl.load(seed_ptr + tl.arange(0, 1)))
    tl.store(bounds_ptr + at, bounds)


@pytest.mark.slow
def test_no_bound_is_too_low_and_few_are_far_too_high():
    """2^21 sums: every noise, and many in the tails, where the formulas change, and of the fewest bits."""
    generator = torch.Generator().manual_seed(0)
    count = 1 << 21
    bits = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    shift, kind = torch.randint(0, 64, (count,), generator=generator), torch.arange(count) % 4
    small = shifted(bits, 1) >> shift
    sixteenth = ~((1 << 60) + (small >> 20) * (1 - 2 * (shift & 1)))  # v near 1/16
    bits = torch.stack((bits, small, ~small, sixteenth))[kind, torch.arange(count)]
    bits[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    y = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-3, 6, (count,), generator=generator)
    sums = y.double() - (-((shifted(bits, 12).double() + 0.5) * 2.0**-52).log()).log()
    found = torch.empty(count, device=DEVICE)
    seed = torch.tensor([3], device=DEVICE)
    _bounds_kernel[(32,)](y.to(DEVICE), bits.to(DEVICE), seed, found, COUNT=count // 32)
    bounds = found.cpu().double()
    margin = 2.0**-16 + bounds.abs() * 2.0**-21
    assert (sums - bounds <= margin).all() and (bounds - sums <= margin)[kind == 0].double().mean() > 0.99


@pytest.mark.parametrize("scale", (0.0, 1.0, 30.0, 1e9, 1e37))
def test_tokens_of_ties_and_of_extreme_numbers_are_those_of_the_definition(scale):
    logits, temperatures, seeds, positions = case(60, 37)
    logits = (logits / 2).round() * scale  # many are equal
    odd = torch.tensor([math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45]).to(DEVICE)
    logits[::3, 7:13], logits[::6, 13:] = odd, -math.inf
    extreme = torch.tensor([0.0, 1e-45, 3e-39, 1e-30, 1e-3, 1e38, -0.5, math.nan]).to(DEVICE)
    temperatures[::4] = extreme.repeat(2)[:15]
    logits[4] = math.nan
    logits[4, 8:10] = torch.tensor([-1.0, 0.0])  # whose temperature has no inverse
    assert draw(logits, temperatures, seeds, positions).equal(ops.draw(logits, temperatures, seeds, positions))


def truncated(rows, vocabulary, dtype):
    generator = torch.Generator().manual_seed(rows * vocabulary)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 3).to(dtype)
    temperatures = torch.rand(rows, generator=generator) + 0.3
    top_p = torch.tensor([0.9, 1.0, 0.5, 1.0, 1e-45]).repeat(rows)[:rows]
    top_k = torch.tensor([-1, 20, 5, 2**30]).repeat(rows)[:rows]
    min_p = torch.tensor([0.0, 0.0, 0.05, 1.0, 0.01, 0.0, 0.0]).repeat(rows)[:rows]
    return [value.to(DEVICE) for value in (logits, temperatures, top_p, top_k, min_p)]


# Less than a block, a whole number of them, several blocks.
@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", (1, 1024, 1300))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
def test_floors_are_those_of_the_definition(vocabulary, dtype):
    arguments = truncated(9, vocabulary, dtype)
    assert truncation_floors(*arguments).equal(ops.truncation_floors(*arguments))
    strided = torch.zeros(9, vocabulary + 5, dtype=dtype, device=DEVICE)[:, 2 : vocabulary + 2].copy_(arguments[0])
    assert truncation_floors(strided, *arguments[1:]).equal(ops.truncation_floors(*arguments))


@pytest.mark.slow
def test_numbers_out_of_the_ordinary_have_the_same_place():
    logits = torch.zeros(5, 1500, device=DEVICE)
    logits[0, ::2], logits[0, 1499] = math.nan, 1.0
    logits[1, 3], logits[1, 1100], logits[1, 7] = math.inf, math.inf, -3e38
    logits[2] = -math.inf
    logits[3] = math.nan
    logits[4, ::3], logits[4, 5] = -0.0, -1e-45
    settings = torch.full((5,), 0.9), torch.full((5,), 30), torch.full((5,), 0.001)
    for chosen in (settings, (torch.ones(5), settings[1], torch.zeros(5)), (torch.ones(5), -settings[1], settings[2])):
        arguments = [value.to(DEVICE) for value in (logits, torch.full((5,), 0.5), *chosen)]
        assert truncation_floors(*arguments).equal(ops.truncation_floors(*arguments))
