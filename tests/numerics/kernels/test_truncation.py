"""The kernel of floors against the torch op: the same numbers, in one launch."""

import math

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.kernels.draw import truncation_floors
from tests.support.kernels import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def case(rows, vocabulary, dtype):
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
    arguments = case(9, vocabulary, dtype)
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
