"""On a GPU, with the kernels that it would choose: codes and digests of the CPU, row-invariant ops. Skipped without."""

from contextlib import nullcontext

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import choose, using
from fp8rl.numerics.backend.probe import row_variant_ops
from fp8rl.numerics.digest import tensor_digest
from fp8rl.numerics.ops import draw
from fp8rl.numerics.quantize import fake_quantize_columns, fake_quantize_rows, quantize
from fp8rl.numerics.spec import QuantSpec, TensorSpec

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def chosen():
    with using("torch"):
        yield choose("cuda", QuantSpec.preset("fp8_block_pow2"))


def numbers(*shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).mul(3).exp().bfloat16()
    x[0] = 0
    return x


@pytest.mark.parametrize("format", ("e4m3", "e5m2"))
@pytest.mark.parametrize("granularity", ("tensor", "channel", "token_group", "block"))
def test_power_of_two_codes_and_scales_are_bit_equal(granularity, format):
    spec, x = TensorSpec(granularity=granularity, format=format), numbers(260, 391)
    with nullcontext() if granularity in ("token_group", "block") else using("torch"):  # no kernels for the others
        there = quantize(x.cuda(), spec)
    digest = tensor_digest(there.data)
    with using("torch"):
        here = quantize(x, spec)
        assert torch.equal(here.data.view(torch.uint8), there.data.cpu().view(torch.uint8))
        assert torch.equal(here.scale_inv, there.scale_inv.cpu())
        assert torch.equal(here.dequantize(), there.dequantize().cpu())
        assert tensor_digest(here.data) == digest


def test_fake_quantization_is_bit_equal():
    x = numbers(260, 384)
    for quantizer in (fake_quantize_rows, fake_quantize_columns):
        assert torch.equal(quantizer(x, TensorSpec()), quantizer(x.cuda(), TensorSpec()).cpu())


def test_an_fp8_gpu_runs_the_kernels_and_they_are_row_invariant(chosen):
    assert chosen == "triton" or torch.cuda.get_device_capability() < (8, 9)
    assert row_variant_ops("cuda") == []


def test_ops_are_close_to_the_cpu():
    x, weight = torch.randn(64, 512).bfloat16(), torch.ones(512).bfloat16()
    found = ops.rms_norm(x.cuda(), weight.cuda(), 1e-6).cpu(), ops.swiglu(x.cuda()).cpu()
    with using("torch"):
        assert torch.allclose(ops.rms_norm(x, weight, 1e-6), found[0], rtol=2**-7)
        assert torch.allclose(ops.swiglu(x), found[1], rtol=2**-7, atol=1e-3)


def test_tokens_are_drawn_as_on_a_cpu_and_alike_in_every_batch():
    """The two logarithms of the noise may differ in the last bit of FP64, which no token hangs on."""
    logits, rows = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)) * 3, torch.arange(64)
    arguments = (logits, torch.full((64,), 0.8), rows * 977, rows * 13)
    there = draw(*(value.cuda() for value in arguments)).cpu()
    with using("torch"):
        assert there.equal(draw(*arguments))
    alone = [draw(*(value[row : row + 1].cuda() for value in arguments)).cpu() for row in range(64)]
    assert torch.cat(alone).equal(there)
