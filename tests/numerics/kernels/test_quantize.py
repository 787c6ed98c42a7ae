"""The quantizer kernels against the torch quantizer: codes and scales, bit for bit."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import triton
import triton.language as tl

from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.kernels.arithmetic import inverse, scale_from_amax
from fp8rl.numerics.kernels.products.operands import backward_operands
from fp8rl.numerics.kernels.quantize import (
    empty_blocks,
    quantize_blocks,
    quantize_both_ways,
    quantize_many,
    quantize_rows,
)
from fp8rl.numerics.kernels.quantize import quantize as quantize_kernel
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.rounding import scale_from_amax as definition
from fp8rl.numerics.spec import QuantSpec, TensorSpec
from tests.support.kernels import DEVICE

FORMATS, SCALES, POW2 = ("e4m3", "e5m2"), ("pow2", "fp32"), QuantSpec.preset("fp8_block_pow2")


def numbers(*shape, seed=0, dtype=torch.bfloat16):
    """Every power of two that BF16 has, ties, zeros and values that do not count."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator).mul(3).exp()
    x = (x * torch.where(torch.rand(*shape, generator=generator) < 0.5, -1, 1)).to(dtype)
    flat = x.view(-1)
    flat[::97] = 0.0
    flat[5::331] = 2.0**-130
    flat[7::1013] = float("inf")
    flat[11::1511] = float("nan")
    x[: x.shape[0] // 4] = x[: x.shape[0] // 4].nan_to_num(0, 0, 0).clamp(-8, 8).mul(64).round().div(64)
    x[1] = 0.0
    return x


def same(found, expected):
    assert found.data.dtype == expected.data.dtype and found.data.shape == expected.data.shape
    nan = expected.data.float().isnan()
    assert torch.equal(found.data.cpu().float().isnan(), nan)
    codes = found.data.cpu().view(torch.uint8)
    assert torch.equal(codes.masked_fill(nan, 0), expected.data.view(torch.uint8).masked_fill(nan, 0))
    assert torch.equal(found.scale_inv.cpu(), expected.scale_inv)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("format", FORMATS)
def test_the_smallest_numbers(format, dtype):
    """Whose scale the input's dtype caps."""
    spec = TensorSpec(format=format, scale="fp32")
    x = torch.tensor([1.2e-38, 1e-37, 1e-36, 1.3e-36, 1.4e-36, 1e-34], dtype=dtype).repeat(128, 1).t().contiguous()
    same(quantize_rows(x.to(DEVICE), spec), quantize(x, spec))
    blocks = TensorSpec(format=format, scale="fp32", granularity="block")
    for row in x:
        weight = row.expand(128, 128).contiguous()
        same(quantize_blocks(weight.to(DEVICE), blocks), quantize(weight, blocks))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(9, 1152), (2, 3, 128), (5, 300)])
def test_rows(shape, format, scale):
    spec, x = TensorSpec(format=format, scale=scale), numbers(*shape)
    same(quantize_rows(x.to(DEVICE), spec), quantize(x, spec))
    part = numbers(16, 512, dtype=torch.float32)[::2, 128:]  # of another dtype and stride
    same(quantize_rows(part.to(DEVICE), spec), quantize(part.contiguous(), spec))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("format", FORMATS)
def test_columns_are_the_rows_of_the_transpose_also_in_one_pass_with_rows(format, scale):
    spec = POW2.override({"activation": {"format": format, "scale": scale}, "gradient": {"format": "e5m2"}})
    dy, x = numbers(200, 140), numbers(200, 260, seed=1, dtype=torch.float32)
    filled = [torch.nn.functional.pad(each, (0, 0, 0, 56)).t().contiguous() for each in (dy, x)]
    roles = spec.gradient, spec.gradient, spec.activation
    for found, *expected in zip(backward_operands(dy.to(DEVICE), x.to(DEVICE), spec), (dy, *filled), roles):
        same(found, quantize(*expected))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", [(256, 384), (200, 140)])
def test_blocks_and_their_transpose_in_one_pass(shape, scale):
    spec, weights = TensorSpec(granularity="block", scale=scale), [numbers(*shape, seed=seed) for seed in range(3)]
    codes, transposed = quantize_both_ways(torch.stack(weights).to(DEVICE), spec)
    same(codes, quantize(torch.stack(weights), spec))
    same(transposed, quantize(torch.stack(weights).transpose(1, 2).contiguous(), spec))
    for w in (weights[0], torch.stack(weights)):
        out = empty_blocks(w.shape, spec, DEVICE)
        assert quantize_blocks(w.to(DEVICE), spec, out) is out
        same(out, quantize(w, spec))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_many_matrices_of_any_shape_in_one_launch(dtype):
    spec = TensorSpec(granularity="block")
    shapes = [(128, 256), (256, 128), (3, 128, 128), (130, 70), (0, 128)]
    weights = [numbers(*shape, dtype=dtype) if shape[0] else torch.empty(shape, dtype=dtype) for shape in shapes]
    weights.append(weights[0][:, 128:])  # a part of a larger matrix
    for some in (weights, weights[:3]):
        found = quantize_many([w.to(DEVICE) for w in some], spec)
        for one, w in zip(found, some, strict=True):
            same(one, quantize(w, spec))
    rows = [numbers(3, 256), numbers(2, 128, dtype=dtype)]
    for one, x in zip(quantize_many([x.to(DEVICE) for x in rows], TensorSpec()), rows, strict=True):
        same(one, quantize(x, TensorSpec()))


@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 256), (300,)])
def test_no_rows_as_on_a_rank_whose_experts_nobody_chose_and_a_single_one(shape):
    x = numbers(2, *shape)[0] if shape[0] else torch.empty(shape, dtype=torch.bfloat16)
    found, expected = quantize_rows(x.to(DEVICE), TensorSpec()), quantize(x, TensorSpec())
    same(found, expected)
    assert found.scale_inv.shape == expected.scale_inv.shape


@pytest.mark.parametrize("scale", SCALES)
def test_a_static_range(scale):
    rows, blocks = (TensorSpec(granularity=g, fixed=200.0, scale=scale) for g in ("token_group", "block"))
    x = numbers(130, 260)
    same(quantize_rows(x.to(DEVICE), rows), quantize(x, rows))
    same(quantize_blocks(x.to(DEVICE), blocks), quantize(x, blocks))
    role = {"fixed": 200.0, "scale": scale}
    found = backward_operands(x.to(DEVICE), x.to(DEVICE), POW2.override({"activation": role, "gradient": role}))
    filled = torch.nn.functional.pad(x, (0, 0, 0, 126)).t().contiguous()
    for quantized, expected in zip(found, (x, filled, filled), strict=True):
        same(quantized, quantize(expected, rows))


@pytest.mark.parametrize("changes", [{"scale": "e8m0"}, {"rounding": "stochastic"}, {"group": 32}])
def test_what_there_is_no_kernel_for_is_refused(changes):
    spec, x = TensorSpec(**changes), numbers(4, 256).to(DEVICE)
    blocks = TensorSpec(granularity="block", **changes)
    calls = (quantize_kernel, x, spec), (quantize_rows, x, spec), (quantize_both_ways, x[None], blocks)
    for quantizer, *given in calls:
        with pytest.raises(UserError, match="spec: found .* rounding to nearest, where the GPU kernels run"):
            quantizer(*given)


@pytest.mark.slow
@hypothesis.settings(max_examples=15)
@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from(FORMATS), st.sampled_from(SCALES))
def test_any_bits_are_quantized_alike(seed, format, scale):
    bits = torch.randint(0, 2**16, (2, 128), generator=torch.Generator().manual_seed(seed)).to(torch.int16)
    spec, x = TensorSpec(format=format, scale=scale), bits.view(torch.bfloat16)
    same(quantize_rows(x.to(DEVICE), spec), quantize(x, spec))


@triton.jit
def _scales_kernel(amax_ptr, scale_ptr, inverse_ptr, COUNT: tl.constexpr, E5M2: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    scale = scale_from_amax(tl.load(amax_ptr + at), E5M2, True, None, True)
    tl.store(scale_ptr + at, scale)
    tl.store(inverse_ptr + at, inverse(scale, True))


def check_power_of_two_scales(amax, format):
    """amax: FP32, a whole number of programs of 1,024; not negative and not NaN, as amaxes are."""
    amax = amax.to(DEVICE)
    scale, reciprocal = torch.empty_like(amax), torch.empty_like(amax)
    _scales_kernel[(len(amax) // 1024,)](amax, scale, reciprocal, COUNT=1024, E5M2=format == "e5m2")
    dtype = TensorSpec(format=format).dtype
    for held_in in (torch.bfloat16, torch.float32):
        expected = definition(amax.cpu(), dtype, "pow2", held_in)
        assert torch.equal(scale.cpu(), expected) and torch.equal(reciprocal.cpu(), 1.0 / expected)


@pytest.mark.parametrize("format", FORMATS)
def test_every_bf16_amax_has_the_power_of_two_of_the_division(format):
    amax = torch.arange(0x7F80 + 1, dtype=torch.int32)  # 0 to infinity
    amax = torch.cat((amax, amax.new_zeros(-len(amax) % 1024)))
    check_power_of_two_scales((amax << 16).view(torch.float32), format)


@pytest.mark.slow
@hypothesis.settings(max_examples=30)
@hypothesis.given(st.integers(0, 0x7F800000), st.sampled_from(FORMATS))
def test_any_fp32_amax_has_the_power_of_two_of_the_division(bits, format):
    """These bits in every exponent, and the numbers around them and around 1.75 times a power of two."""
    exponents = torch.arange(255, dtype=torch.int32) << 23
    near = [(bits & 0x7FFFFF), 0x5FFFFF, 0x600000, 0x600001]
    amax = torch.cat([exponents + mantissa for mantissa in near])
    amax = torch.cat((amax, torch.tensor([0, 0x7F7FFFFF, 0x7F800000, bits], dtype=torch.int32)))
    check_power_of_two_scales(amax.view(torch.float32), format)
