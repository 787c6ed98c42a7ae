"""The product kernels: against float64 within the accumulator's bound, and bit for bit where the order decides."""

import pytest
import torch
import torch.nn.functional as F

from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.kernels.products import gemm as product
from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.quantize import QuantizedTensor, fake_quantize_columns
from fp8rl.numerics.spec import TensorSpec
from tests.support.kernels import BF16_BITS, DEVICE, FP8_BITS, GPU, quantized, same

BLOCK = TensorSpec(granularity="block")


def numbers(*shape, seed=0, dtype=torch.bfloat16):
    """Rows and columns of different sizes, so that scales differ."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return (x * torch.randn(shape[0], 1, generator=generator).exp() * torch.linspace(0.1, 3, shape[-1])).to(dtype)


def exact(x):
    return (x.dequantize(torch.float32) if isinstance(x, QuantizedTensor) else x).double().cpu()


def check(found, a, b):
    """|found - a b^T| is at most what the accumulators may lose, and one rounding.

    Each of the 128 products of a group, and of the 4 sums carried between instructions, loses at most a unit in the
    last place that the accumulator keeps of the sum of sizes; each promotion rounds three times in FP32. Without
    promotion, 132 losses for each group of K are more than all.
    """
    promoted, a, b = isinstance(a, QuantizedTensor), exact(a), exact(b)
    steps = -(-a.shape[1] // 128)
    each = 2.0 ** (1 - FP8_BITS) if promoted else steps * 2.0 ** (1 - BF16_BITS)
    expected, sizes = a @ b.t(), a.abs() @ b.t().abs()
    lost = (132 * each + 3 * steps * 2.0**-24) * sizes
    rounding = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}[found.dtype]
    error = (found.double().cpu() - expected).abs()
    assert (error <= lost + rounding * (expected.abs() + lost)).all(), (error / sizes).max()


def part(x, rows=slice(None), groups=slice(None)):
    """Some rows of a tensor in groups, and some of their groups."""
    columns = slice(groups.start and groups.start * 128, groups.stop and groups.stop * 128)
    return QuantizedTensor(x.data[rows, columns], x.scale_inv[rows, groups], x.spec)


@pytest.mark.slow
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize("granularity", ["block", "token_group"])
@pytest.mark.parametrize("format_a, format_b", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
def test_fp8_within_the_bound(format_a, format_b, granularity, scale, out):
    a = quantized(numbers(130, 384), TensorSpec(format=format_a, scale=scale))
    b = quantized(numbers(256, 384, seed=1), TensorSpec(format=format_b, granularity=granularity, scale=scale))
    check(gemm(a, b, out), a, b)


@pytest.mark.parametrize("granularity", ["block", "token_group"])
@pytest.mark.parametrize("shape", [(1, 128, 128), (7, 130, 300), (129, 57, 136), (200, 300, 17)])
def test_ragged_edges(shape, granularity):
    m, n, k = shape
    a = quantized(numbers(m, k), TensorSpec())
    b = quantized(numbers(n, k, seed=1), TensorSpec(granularity=granularity))
    check(gemm(a, b, torch.float32), a, b)


@pytest.mark.parametrize("granularity", ["block", "token_group"])
def test_each_128_of_k_is_scaled_and_added_in_order(granularity):
    """Codes so small that every product of 128 is exact: what is left is the scales' arithmetic, which is defined."""
    steps, generator = 5, torch.Generator().manual_seed(0)
    codes = [torch.randint(-3, 4, (rows, 128 * steps), generator=generator).float() for rows in (40, 256)]
    b_rows = 2 if granularity == "block" else 256
    scales = [torch.rand(rows, steps, generator=generator) + 0.1 for rows in (40, b_rows)]
    specs = TensorSpec(scale="fp32"), TensorSpec(scale="fp32", granularity=granularity)
    a, b = (
        QuantizedTensor(code.to(torch.float8_e4m3fn).to(DEVICE), scale.to(DEVICE), spec)
        for code, scale, spec in zip(codes, scales, specs, strict=True)
    )
    acc = torch.zeros(40, 256)
    for step in range(steps):
        product = codes[0][:, step * 128 :][:, :128] @ codes[1][:, step * 128 :][:, :128].t()
        scale = scales[0][:, step, None] * scales[1][:, step].repeat_interleave(256 // b_rows)
        # A GPU adds the product unrounded; the interpreter rounds it first.
        acc = (acc.double() + product.double() * scale.double()).float() if GPU else acc + product * scale
    same(gemm(a, b, torch.float32).cpu(), acc)


SOME_ROWS = [slice(1), slice(2), slice(7), slice(65), slice(130), slice(199, 200), slice(61, 131)]


def test_a_row_has_the_same_bits_among_any_others(monkeypatch):
    a, b = quantized(numbers(200, 256), TensorSpec()), quantized(numbers(192, 256, seed=1), BLOCK)
    whole = gemm(a, b, torch.bfloat16)
    for rows in SOME_ROWS:
        same(gemm(part(a, rows), b, torch.bfloat16), whole[rows])
    assert gemm(part(a, slice(0)), b, torch.bfloat16).shape == (0, 192)
    for count in (2, 4, 100):  # programs that share the tiles
        monkeypatch.setattr(product, "programs", lambda device, count=count: count)
        same(gemm(a, b, torch.bfloat16), whole)
    for dtype in (torch.bfloat16, torch.float32):
        a, b = numbers(200, 192, dtype=dtype).to(DEVICE), numbers(130, 192, seed=1, dtype=dtype).to(DEVICE)
        whole = gemm(a, b, torch.float32)
        for rows in SOME_ROWS:
            same(gemm(a[rows], b, torch.float32), whole[rows])
        partials = [gemm(*parts, torch.float32) for parts in zip(a.split(64, 1), b.split(64, 1))]
        same(gemm(a, b, torch.float32, 3), partials[0] + partials[1] + partials[2])


def test_an_element_has_the_same_bits_in_a_wider_weight():
    """As on a tensor-parallel rank, which holds a part of the columns."""
    a, b = numbers(9, 128).to(DEVICE), numbers(2048, 128, seed=1).to(DEVICE)
    same(gemm(a, b[:128], torch.bfloat16), gemm(a, b, torch.bfloat16)[:, :128])
    fp8, weight = quantized(a.cpu(), TensorSpec()), quantized(b.cpu(), BLOCK)
    narrow = QuantizedTensor(weight.data[:128], weight.scale_inv[:1], BLOCK)
    same(gemm(fp8, narrow, torch.bfloat16), gemm(fp8, weight, torch.bfloat16)[:, :128])


@pytest.mark.slow
@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("granularity", ["block", "token_group"])
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_slices_of_k_are_added_like_separate_products(granularity, splits, scale):
    a = quantized(numbers(40, 768), TensorSpec(scale=scale))
    b = quantized(numbers(256, 768, seed=1), TensorSpec(granularity=granularity, scale=scale))
    size = 6 // splits
    total = None
    for first in range(0, 6, size):
        groups = slice(first, first + size)
        right = QuantizedTensor(b.data[:, first * 128 :][:, : size * 128], b.scale_inv[:, groups], b.spec)
        partial = gemm(part(a, groups=groups), right, torch.float32)
        total = partial if total is None else total + partial
    same(gemm(a, b, torch.float32, splits), total)
    same(gemm(a, b, torch.bfloat16, splits), total.bfloat16())
    if scale == "fp32" or DEVICE == "cpu":  # times powers of two, a GPU's sums of 14 bits add up exactly in any order
        assert not torch.equal(gemm(a, b, torch.float32), total)


@pytest.mark.slow
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(130, 200, 320), (3, 2, 7), (129, 2100, 72)])
def test_unquantized_within_the_bound(shape, dtype, out):
    m, n, k = shape
    a, b = numbers(m, k, dtype=dtype).to(DEVICE), numbers(n, k, seed=1, dtype=dtype).to(DEVICE)
    check(gemm(a, b, out), a, b)


def test_nothing_beyond_the_edges_is_read():
    """Operands and scales as views into NaN: what lies around them must not reach the result."""

    def inside(x):
        room = torch.full((x.shape[0] + 140, x.shape[1] + 160), float("nan")).to(x.dtype).to(DEVICE)
        room[: x.shape[0], : x.shape[1]] = x
        return room[: x.shape[0], : x.shape[1]]

    a, b = quantized(numbers(70, 200), TensorSpec()), quantized(numbers(50, 200, seed=1), TensorSpec())
    left, right = (QuantizedTensor(inside(x.data), inside(x.scale_inv), x.spec) for x in (a, b))
    same(gemm(left, right, torch.float32), gemm(a, b, torch.float32))
    left, right = (
        QuantizedTensor(x.data.t().contiguous().t(), x.scale_inv.t().contiguous().t(), x.spec) for x in (a, b)
    )
    same(gemm(left, right, torch.float32), gemm(a, b, torch.float32))
    a, b = numbers(70, 200).to(DEVICE), numbers(50, 200, seed=1).to(DEVICE)
    same(gemm(inside(a), inside(b), torch.float32), gemm(a, b, torch.float32))


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_weight_gradient_of_ragged_tokens(scale):
    """dy^T x of 200 tokens, quantized along them, as `numerics.ops.linear` defines it."""
    spec, gradient = TensorSpec(scale=scale), TensorSpec(format="e5m2", scale=scale)
    dy, x = numbers(200, 136), numbers(200, 256, seed=1)
    a, b = quantized(dy.t().contiguous(), gradient), quantized(x.t().contiguous(), spec)
    assert torch.equal(exact(a), fake_quantize_columns(dy, gradient).double().t())
    assert torch.equal(exact(b), fake_quantize_columns(x, spec).double().t())
    found = gemm(a, b, torch.float32)
    check(found, a, b)
    same(found, gemm(filled_up(a), filled_up(b), torch.float32))


def filled_up(x):
    """Columns up to a multiple of 128, with zeros."""
    data = F.pad(x.data.view(torch.uint8), (0, -x.data.shape[1] % 128)).view(x.data.dtype)
    return QuantizedTensor(data, x.scale_inv, x.spec)


def test_what_does_not_fit_is_refused():
    a, b = quantized(numbers(4, 256), TensorSpec()), quantized(numbers(128, 256), BLOCK)
    x = numbers(4, 256).to(DEVICE)
    for refused, said in (
        ((x, x[:, :128]), "the same K"), ((x, x[None]), "2 and 2 dimensions"), ((b, a), "groups of 128"),
        ((a, x), "groups of 128"), ((x, x.float()), "float32"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            gemm(*refused, torch.float32)
    with pytest.raises(UserError, match="k_splits: found 4"):
        gemm(a, b, torch.float32, 4)
