"""Products: values and gradients against explicit quantize-dequantize computations, and slices against the whole."""

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.ops.grouped import grouped_linear
from fp8rl.numerics.ops.linear import filled_up, multiplies_bf16, product
from fp8rl.numerics.quantize import fake_quantize, fake_quantize_rows, quantize
from fp8rl.numerics.spec import QuantSpec

POW2, FP32 = QuantSpec.preset("fp8_block_pow2"), QuantSpec.preset("fp8_block_fp32")
MX, IRONWOOD = QuantSpec.preset("mxfp8"), QuantSpec.preset("ironwood")
E5M2_GRADIENTS = POW2.override({"gradient": {"format": "e5m2"}})


def operands(tokens=200, k=256, n=384, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, k, generator=generator).bfloat16()
    weight = (torch.randn(n, k, generator=generator) / k**0.5).bfloat16()
    dy = torch.randn(tokens, n, generator=generator).bfloat16()
    return x.requires_grad_(), weight.requires_grad_(), dy


def along_tokens(x, spec):
    """Quantized in groups of 128 tokens, by the plain quantizer on the transpose."""
    return quantize(x.detach().t().contiguous(), spec).dequantize(torch.float64).t()


def close(found, expected):
    """BF16 results of sums in another order: equal to within two BF16 roundings of the largest element."""
    assert (found.double() - expected).abs().max() <= 2**-7 * expected.abs().max()


STOCHASTIC = POW2.override({role: {"rounding": "stochastic"} for role in ("weight", "activation", "gradient")})


@pytest.mark.parametrize(
    "spec",
    (POW2, FP32, E5M2_GRADIENTS, MX, IRONWOOD, STOCHASTIC),
    ids=("pow2", "fp32", "e5m2 gradients", "mxfp8", "ironwood", "stochastic"),
)
@pytest.mark.parametrize("tokens", (5, 128, 200))
def test_fp8_gradients_are_those_of_the_quantized_operands(spec, tokens):
    x, weight, dy = operands(tokens)
    y = ops.fp8_linear(x, weight, fake_quantize(weight.detach(), spec.weight), spec)
    y.backward(dy)
    xq = quantize(x.detach(), spec.activation).dequantize(torch.float64)
    wq = quantize(weight.detach(), spec.weight).dequantize(torch.float64)
    close(y, xq @ wq.t())
    close(x.grad, quantize(dy, spec.gradient).dequantize(torch.float64) @ wq)
    close(weight.grad, along_tokens(dy, spec.gradient).t() @ along_tokens(x, spec.activation))


def test_bf16_backward_is_straight_through():
    x, weight, dy = operands()
    wq = fake_quantize(weight.detach(), POW2.weight)
    ops.fp8_linear(x, weight, wq, POW2, backward="bf16").backward(dy)
    xq = quantize(x.detach(), POW2.activation).dequantize(torch.float64)
    close(x.grad, dy.double() @ wq.double())
    close(weight.grad, dy.double().t() @ xq)


def test_power_of_two_product_rounds_the_exact_one_once():
    x, weight, _ = operands()
    wq = fake_quantize(weight.detach(), POW2.weight)
    y = ops.fp8_linear(x.detach(), weight, wq, POW2).double()
    exact = fake_quantize_rows(x.detach(), POW2.activation).double() @ wq.double().t()
    assert ((y - exact).abs() <= 2**-8 * exact.abs() + 2**-20 * exact.abs().max()).all()


def test_products_of_any_number_of_rows_are_computed_for_few_numbers_of_rows():
    assert len({filled_up(rows) for rows in range(4097)}) < 50


@pytest.mark.parametrize("quantized", (False, True))
def test_sums_of_slices_are_added_first_to_last_whoever_computes_them(quantized):
    """2^24 + 1 rounds to 2^24 in FP32, and so once more. So the four sums give 0 in order, 1 in pairs, 2 in FP64."""
    x = torch.ones(1, 512).bfloat16()
    weight = torch.tensor([2.0**17, 2.0**-7, 2.0**-7, -(2.0**17)]).repeat_interleave(128)[None].bfloat16()
    wq = fake_quantize(weight.expand(128, -1), POW2.weight)[:1]

    def sums(first, last, slices):
        own = [each[:, first:last].contiguous() for each in (x, weight, wq)]
        return ops.partial_sums(slices, *own, POW2) if quantized else ops.partial_sums(slices, *own[:2])

    assert [each.item() for each in sums(0, 512, 4)] == [2.0**24, 1, 1, -(2.0**24)]
    on_two_ranks = torch.cat([ops.stacked(sums(0, 256, 2)), ops.stacked(sums(256, 512, 2))])
    whole = ops.fp8_linear(x, weight, wq, POW2, k_splits=4) if quantized else ops.linear(x, weight, 4)
    assert whole.item() == ops.merge_partials(list(on_two_ranks), torch.bfloat16).item() == 0
    in_pairs = [ops.merge_partials(sums(*half, 2), torch.float32) for half in ((0, 256), (256, 512))]
    assert ops.merge_partials(in_pairs, torch.bfloat16).item() == 1


@pytest.mark.parametrize(
    "spec",
    (None, POW2, FP32, IRONWOOD, MX, POW2.override({"activation": {"group": 32}})),
    ids=("bf16", "pow2", "fp32", "ironwood", "mxfp8", "groups of 32 and of 128"),
)
@pytest.mark.parametrize("counts", ([7, 0, 130, 1], [0, 0, 0, 64], [3, 1, 0, 2]))
def test_grouped_product_is_each_group_on_its_own(spec, counts):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), 256, generator=generator).bfloat16()
    weights = (torch.randn(len(counts), 128, 256, generator=generator) / 16).bfloat16().requires_grad_()
    dequantized = None if spec is None else fake_quantize(weights.detach(), spec.weight)
    dy = torch.randn(sum(counts), 128, generator=generator).bfloat16()
    together = x.clone().requires_grad_()
    out = grouped_linear(together, torch.tensor(counts), weights, dequantized, spec)
    out.backward(dy)
    grads = weights.grad
    for group, (part, d) in enumerate(zip(x.split(counts), dy.split(counts))):
        if not len(part):
            assert not grads[group].any()
            continue
        alone, weight = part.clone().requires_grad_(), weights[group].detach().clone().requires_grad_()
        own = (alone, weight) if spec is None else (alone, weight, dequantized[group], spec)
        expected = ops.linear(*own) if spec is None else ops.fp8_linear(*own)
        expected.backward(d)
        at = slice(sum(counts[:group]), sum(counts[: group + 1]))
        assert torch.equal(out[at], expected) and torch.allclose(together.grad[at], alone.grad, rtol=2**-7, atol=2**-7)
        assert torch.allclose(grads[group], weight.grad, rtol=2**-7, atol=2**-6)


@pytest.mark.skipif(multiplies_bf16("cpu"), reason="of CPUs without AVX-512")
@pytest.mark.parametrize("columns", [1, 3, 8, 12, 48])
def test_columns_have_the_same_bits_with_fewer_beside_them(columns: int) -> None:
    x, weight = torch.randn(40, 512).bfloat16(), torch.randn(96, 512).bfloat16()
    parts = [product(x, part, torch.float32) for part in weight.split(columns)]
    assert torch.equal(torch.cat(parts, 1), product(x, weight, torch.float32))
