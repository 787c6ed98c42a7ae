"""Products of frozen weights, from codes alone, have the bits of trained ones, whose operands are cached."""

from __future__ import annotations

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import Implementation, using
from fp8rl.numerics.ops.grouped import grouped_linear
from fp8rl.numerics.quantize import fake_quantize, quantize
from fp8rl.numerics.spec import QuantSpec
from fp8rl.numerics.weight_cache import Frozen, WeightCache, freeze, frozen_of

N, K, BLOCK = 512, 256, 128
SPEC = QuantSpec.preset("fp8_block_pow2").weight
COUNTS = torch.tensor([5, 0, 12])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def compare_with_trained(op, weight, spec, dy, *more) -> None:
    """A product of a frozen weight, and its gradient, have the bits of that of a trained one."""
    found = []
    for operand in (ops.trained_operand(weight, spec.weight), Frozen(quantize(weight, spec.weight))):
        x = random(len(dy), K).requires_grad_()
        y = op(x, weight, operand, spec, *more)
        y.backward(dy)
        found.append((y, x.grad))
    for trained, frozen in zip(*found, strict=True):
        assert torch.equal(trained, frozen)


@pytest.mark.parametrize("preset", ["fp8_block_pow2", "fp8_block_fp32"])
@pytest.mark.parametrize("backward", ["fp8", "bf16"])
@pytest.mark.parametrize("k_splits", [1, 2])
def test_a_frozen_product_and_its_gradient_have_the_bits_of_a_trained_one(preset, backward, k_splits) -> None:
    spec, weight = QuantSpec.preset(preset), random(N, K, seed=1)
    compare_with_trained(ops.fp8_linear, weight, spec, random(7, N, seed=2), backward, k_splits)


@pytest.mark.parametrize("backward", ["fp8", "bf16"])
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_frozen_experts_have_the_bits_of_trained_ones(implementation: Implementation, backward) -> None:
    spec, stack, dy = QuantSpec.preset("fp8_block_pow2"), random(3, BLOCK, K, seed=1), random(17, BLOCK, seed=2)
    with using(implementation):
        compare_with_trained(lambda x, *given: grouped_linear(x, COUNTS, *given), stack, spec, dy, backward)


def test_rows_that_lie_in_another_order_are_taken_in_the_products_own() -> None:
    """Codes and scales of what lies as 3 0 2 1, of which the product takes 0 1 2."""
    spec = QuantSpec.preset("fp8_block_fp32").weight
    weight = random(N, K) * torch.exp2(torch.arange(N // BLOCK).repeat_interleave(BLOCK))[:, None]
    there = quantize(torch.cat([weight.bfloat16().split(BLOCK)[index] for index in (3, 0, 2, 1)]), spec)
    frozen = Frozen(there, torch.tensor([1, 3, 2]), BLOCK)
    here = quantize(weight.bfloat16()[: 3 * BLOCK], spec)
    assert torch.equal(frozen.codes.data.view(torch.uint8), here.data.view(torch.uint8))
    assert torch.equal(frozen.codes.scale_inv, here.scale_inv) and torch.equal(frozen.dequantized(), here.dequantize())
    assert torch.equal(frozen.chunk(2, -1)[1].dequantized(), here.dequantize()[:, K // 2 :])
    assert torch.equal(frozen.transposed.dequantize(), here.dequantize().t())


def test_a_frozen_parameter_keeps_its_shape_and_no_memory() -> None:
    weight = random(N, K)
    codes = quantize(weight, QuantSpec.preset("fp8_block_pow2").weight)
    parameter = torch.nn.Parameter(weight.clone())
    freeze(parameter, Frozen(codes))
    cache = WeightCache()
    assert (parameter.shape, parameter.dtype, parameter.requires_grad) == (weight.shape, weight.dtype, False)
    assert parameter.untyped_storage().nbytes() == 2 and parameter.isnan().all()
    assert cache.operand(parameter, codes.spec) is frozen_of(parameter)
    assert torch.equal(cache.served(parameter), codes.dequantize()) and not list(cache.operands())


def test_computed_once_per_version_and_never_stale():
    weight = torch.nn.Parameter(torch.randn(128, 256).bfloat16())
    cache = WeightCache()
    first = cache.operand(weight, SPEC)
    assert cache.operand(weight, SPEC) is first
    weight.data.mul_(3)  # as optimizers write: torch's version counter does not move
    cache.drop()
    assert torch.equal(cache.operand(weight, SPEC), fake_quantize(weight.detach(), SPEC))
    assert not torch.equal(cache.operand(weight, SPEC), first)


def test_experts_are_cached_as_one_weight():
    stack, cache = torch.randn(3, 128, 128).bfloat16(), WeightCache()
    operand = cache.operand(stack, SPEC)
    assert cache.operand(stack, SPEC) is operand and [weight for weight, _ in cache.operands()] == [stack]
    assert all(torch.equal(found, fake_quantize(one, SPEC)) for found, one in zip(operand, stack, strict=True))
