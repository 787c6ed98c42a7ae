"""On a GPU, with the kernels that it would choose: row-invariant ops, and the tokens of a CPU. Skipped without."""

import pytest
import torch

from fp8rl.numerics.backend.implementation import choose, using
from fp8rl.numerics.backend.probe import row_variant_ops
from fp8rl.numerics.ops import draw
from fp8rl.numerics.spec import QuantSpec

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def chosen():
    with using("torch"):
        yield choose("cuda", QuantSpec.preset("fp8_block_pow2"))


def test_an_fp8_gpu_runs_the_kernels_and_they_are_row_invariant(chosen):
    assert chosen == "triton" or torch.cuda.get_device_capability() < (8, 9)
    assert row_variant_ops("cuda") == []


def test_tokens_are_drawn_as_on_a_cpu_and_alike_in_every_batch():
    """The two logarithms of the noise may differ in the last bit of FP64, which no token hangs on."""
    logits, rows = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)) * 3, torch.arange(64)
    arguments = (logits, torch.full((64,), 0.8), rows * 977, rows * 13)
    there = draw(*(value.cuda() for value in arguments)).cpu()
    with using("torch"):
        assert there.equal(draw(*arguments))
    alone = [draw(*(value[row : row + 1].cuda() for value in arguments)).cpu() for row in range(64)]
    assert torch.cat(alone).equal(there)
