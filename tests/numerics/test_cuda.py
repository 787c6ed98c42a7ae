"""On a GPU: the quantizers and shared ops give what they give on the CPU. Skipped where there is none."""

import pytest
import torch

from numerics import ops
from numerics.digest import tensor_digest
from numerics.fake_quantize import fake_quantize_columns, fake_quantize_rows
from numerics.probe import row_variant_ops
from numerics.quantize import quantize
from numerics.spec import TensorSpec

pytestmark = pytest.mark.gpu


def numbers(*shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).mul(3).exp().bfloat16()
    x[0] = 0
    return x


@pytest.mark.parametrize("format", ("e4m3", "e5m2"))
@pytest.mark.parametrize("granularity", ("tensor", "channel", "token_group", "block"))
def test_power_of_two_codes_and_scales_are_bit_equal(granularity, format):
    spec, x = TensorSpec(granularity=granularity, format=format), numbers(260, 391)
    here, there = quantize(x, spec), quantize(x.cuda(), spec)
    assert torch.equal(here.data.view(torch.uint8), there.data.cpu().view(torch.uint8))
    assert torch.equal(here.scale_inv, there.scale_inv.cpu())
    assert torch.equal(here.dequantize(), there.dequantize().cpu())
    assert tensor_digest(here.data) == tensor_digest(there.data)


def test_fake_quantization_is_bit_equal():
    x = numbers(260, 384)
    for quantizer in (fake_quantize_rows, fake_quantize_columns):
        assert torch.equal(quantizer(x, TensorSpec()), quantizer(x.cuda(), TensorSpec()).cpu())


def test_ops_are_close_and_their_rows_invariant():
    x, weight = torch.randn(64, 512).bfloat16(), torch.ones(512).bfloat16()
    assert torch.allclose(ops.rms_norm(x, weight, 1e-6), ops.rms_norm(x.cuda(), weight.cuda(), 1e-6).cpu(), rtol=2**-7)
    assert torch.allclose(ops.swiglu(x), ops.swiglu(x.cuda()).cpu(), rtol=2**-7, atol=1e-3)
    variant = set(row_variant_ops("cuda"))
    assert not variant & {"rms_norm", "swiglu", "rope", "route", "token_logprobs"}, variant
