"""The kernels of the draw and of its truncation against the torch ops: the same tokens and floors, in few launches."""

from __future__ import annotations

import math

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.kernels.draw import draw, truncation_floors
from fp8rl.numerics.sampling import GREEDY
from tests.support.kernels import DEVICE

# The interpreter's numpy warns of NaN and of products that wrap around.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


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
