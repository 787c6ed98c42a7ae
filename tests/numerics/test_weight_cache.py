import torch

from numerics.quantize import fake_quantize, quantize
from numerics.spec import QuantSpec
from numerics.weight_cache import WeightCache

SPEC = QuantSpec.preset("fp8_block_pow2").weight


def test_computed_once_per_version_and_never_stale():
    weight = torch.nn.Parameter(torch.randn(128, 256).bfloat16())
    cache = WeightCache()
    first = cache.dequantized(weight, SPEC)
    assert cache.dequantized(weight, SPEC) is first
    weight.data.mul_(3)  # as optimizers write: torch's version counter does not move
    cache.advance(1)
    assert torch.equal(cache.dequantized(weight, SPEC), fake_quantize(weight.detach(), SPEC))
    assert not torch.equal(cache.dequantized(weight, SPEC), first)
    assert torch.equal(cache.quantized(weight, SPEC).scale_inv, quantize(weight.detach(), SPEC).scale_inv)


def test_weights_are_told_apart_by_identity():
    a = torch.ones(128, 128, dtype=torch.bfloat16)
    b = torch.zeros(128, 128, dtype=torch.bfloat16)
    cache = WeightCache()
    assert cache.dequantized(a, SPEC).sum() == 128 * 128 and cache.dequantized(b, SPEC).sum() == 0
