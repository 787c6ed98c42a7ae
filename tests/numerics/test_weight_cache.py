import torch

from fp8rl.numerics.quantize import fake_quantize
from fp8rl.numerics.spec import QuantSpec
from fp8rl.numerics.weight_cache import WeightCache

SPEC = QuantSpec.preset("fp8_block_pow2").weight


def test_computed_once_per_version_and_never_stale():
    weight = torch.nn.Parameter(torch.randn(128, 256).bfloat16())
    cache = WeightCache()
    first = cache.operand(weight, SPEC)
    assert cache.operand(weight, SPEC) is first
    weight.data.mul_(3)  # as optimizers write: torch's version counter does not move
    cache.advance(1)
    assert torch.equal(cache.operand(weight, SPEC), fake_quantize(weight.detach(), SPEC))
    assert not torch.equal(cache.operand(weight, SPEC), first)


def test_weights_are_told_apart_by_identity():
    a = torch.ones(128, 128, dtype=torch.bfloat16)
    b = torch.zeros(128, 128, dtype=torch.bfloat16)
    cache = WeightCache()
    assert cache.operand(a, SPEC).sum() == 128 * 128 and cache.operand(b, SPEC).sum() == 0


def test_experts_are_cached_together_and_a_stack_as_one_weight():
    stack = torch.randn(3, 128, 128).bfloat16()
    for experts, held in (([*stack.clone()], 3), (stack, 1)):
        cache = WeightCache()
        group = cache.group_operand(experts, SPEC)
        assert cache.group_operand(experts if held == 1 else [*experts], SPEC) is group
        assert all(torch.equal(found, fake_quantize(one, SPEC)) for found, one in zip(group, stack, strict=True))
        assert len(cache.weights()) == held and (held > 1 or cache.weights()[0] is stack)
