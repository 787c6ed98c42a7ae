"""The quantizer against an independent float64 oracle, TransformerEngine's formula, and SGLang's ue8m0."""

import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.quantize import fake_quantize, fake_quantize_columns, fake_quantize_rows, quantize, quantize_many
from fp8rl.numerics.rounding import round_to_grid
from fp8rl.numerics.spec import TensorSpec

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRANULARITIES = ("tensor", "channel", "token_group", "block")
SPECS = [
    *(TensorSpec(format=f, granularity=g, scale=s)
      for f, g, s in itertools.product(("e4m3", "e5m2"), GRANULARITIES, ("pow2", "fp32"))),
    TensorSpec(group=32, scale="e8m0"), TensorSpec(format="e5m2", group=32, scale="e8m0"),
    TensorSpec(granularity="block", scale="e8m0"), TensorSpec(group=32),
    TensorSpec(granularity="tensor", fixed=224.0, scale="fp32"), TensorSpec(granularity="block", fixed=224.0),
    TensorSpec(fixed=0.7), TensorSpec(format="e5m2", granularity="channel", fixed=3.0, scale="fp32"),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_many_tensors_are_quantized_as_each_alone(spec):
    shapes = [(128, 256), (130, 70), (128, 256), (600, 512), (130, 70), (600, 512)]
    weights = [torch.randn(shape, dtype=torch.bfloat16) * 2**place for place, shape in enumerate(shapes)]
    alone = [quantize(weight, spec) for weight in weights]
    outs = [quantize(torch.zeros_like(weight), spec) for weight in weights]
    assert all(one is out for one, out in zip(quantize_many(weights, spec, outs), outs, strict=True))
    for one, other in zip([*outs, *quantize_many(weights, spec)], alone * 2, strict=True):
        assert one.data.view(torch.uint8).equal(other.data.view(torch.uint8))
        assert one.scale_inv.float().equal(other.scale_inv.float()) and one.scale_inv.shape == other.scale_inv.shape


def grid_of(dtype):
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return np.unique(values[torch.isfinite(values)].double().numpy())


def nearest_even(x, dtype):
    """float64 oracle: the nearest grid value, ties to the one with an even code, saturating."""
    grid = grid_of(dtype)
    even = torch.tensor(grid, dtype=torch.float32).to(dtype).view(torch.uint8).numpy() % 2 == 0
    x = np.clip(np.asarray(x, dtype=np.float64), grid[0], grid[-1])
    high = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    low = high - 1
    below, above = x - grid[low], grid[high] - x
    take_low = (below < above) | ((below == above) & even[low])
    return np.where(take_low, grid[low], grid[high])


def te_scale(amax, largest, power_of_two, dtype=torch.bfloat16):
    """TransformerEngine's compute_scale_from_amax, one number at a time; dtype: of the input."""
    if amax == 0 or math.isinf(amax):
        return np.float32(1.0)
    with np.errstate(over="ignore"):
        scale = np.float32(largest) / np.float32(amax)
    if np.isinf(scale):
        scale = np.float32(torch.finfo(dtype).max)
    return np.float32(2.0 ** math.floor(math.log2(scale))) if power_of_two else scale


def mx_scale(amax, dtype):
    """OCP MX 1.0, 6.3: the shared exponent is that of the largest value less that of the format's largest number."""
    if amax == 0 or math.isinf(amax):
        return np.float32(1.0)
    shared = math.floor(math.log2(amax)) - {E4M3: 8, E5M2: 15}[dtype]
    return np.float32(2.0 ** -min(max(shared, -127), 127))


def oracle(x, spec):
    """Block by block in numpy: codes as float64 values, and scale_inv."""
    rows, columns = x.shape
    group = spec.group
    shapes = {"tensor": (rows, columns), "channel": (1, columns), "token_group": (1, group), "block": (group, group)}
    r, c = shapes[spec.granularity]
    largest = grid_of(spec.dtype)[-1]
    values = np.zeros((rows, columns))
    scale_inv = np.zeros((-(-rows // r), -(-columns // c)), dtype=np.float32)
    for i, j in np.ndindex(*scale_inv.shape):
        at = np.s_[i * r : (i + 1) * r, j * c : (j + 1) * c]
        block = x[at].astype(np.float32)
        amax = spec.fixed or np.nanmax(np.abs(block), initial=0.0)
        e8m0 = spec.scale == "e8m0"
        scale = mx_scale(amax, spec.dtype) if e8m0 else te_scale(amax, largest, spec.scale == "pow2")
        values[at] = nearest_even(block * scale, spec.dtype)
        scale_inv[i, j] = np.float32(1.0) / scale
    return values, scale_inv


@pytest.mark.parametrize("dtype", (E4M3, E5M2))
def test_rounding_is_exact_for_every_bf16_number(dtype):
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    numbers = numbers[torch.isfinite(numbers)]
    assert np.array_equal(round_to_grid(numbers, dtype).double().numpy(), nearest_even(numbers.double().numpy(), dtype))
    special = round_to_grid(torch.tensor([math.inf, -math.inf, math.nan]), dtype)
    assert special[0] == grid_of(dtype)[-1] and special[1] == grid_of(dtype)[0] and special[2].isnan()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 300), st.sampled_from(SPECS), st.integers(0, 10**6), st.floats(-30, 30))
def test_codes_and_scales_equal_the_oracle(rows, columns, spec, seed, magnitude):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).mul(2).exp()
    x = (x * 2.0**magnitude).bfloat16()
    x[torch.rand(rows, columns, generator=generator) < 0.1] = 0
    result = quantize(x, spec)
    values, scale_inv = oracle(x.float().numpy(), spec)
    assert result.data.shape == x.shape and result.data.dtype == spec.dtype
    assert np.array_equal(result.scale_inv.float().numpy(), scale_inv)
    assert np.array_equal(result.data.double().numpy(), values)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([s for s in SPECS if s.scale != "fp32"]), st.integers(0, 10**6))
def test_power_of_two_values_are_exact_in_bf16_and_survive_requantization(spec, seed):
    x = torch.randn(130, 260, generator=torch.Generator().manual_seed(seed)).mul(2).exp().bfloat16()
    once = quantize(x, spec)
    assert once.dequantize().dtype == torch.bfloat16
    assert torch.equal(once.dequantize().float(), once.dequantize(torch.float32))
    assert torch.equal(fake_quantize(once.dequantize(), spec), once.dequantize())


@pytest.mark.slow
@pytest.mark.parametrize("scale", ("pow2", "fp32"))
@pytest.mark.parametrize("format", ("e4m3", "e5m2"))
def test_scales_equal_transformer_engines_for_every_bf16_amax(format, scale):
    """Subnormal to largest; the blocks' codes are those of the oracle as well."""
    spec = TensorSpec(format=format, scale=scale, granularity="channel")
    amax = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    x = torch.stack((amax, -amax / 3, amax / 300), 1)
    result = quantize(x, spec)
    largest = grid_of(spec.dtype)[-1]
    scales = np.array([te_scale(a, largest, scale == "pow2") for a in amax.float().numpy()])
    assert np.array_equal(result.scale_inv[:, 0].numpy(), np.float32(1.0) / scales)
    codes = nearest_even(x.float().numpy() * scales[:, None], spec.dtype)
    assert np.array_equal(result.data.double().numpy(), codes)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("format", ("e4m3", "e5m2"))
def test_scales_of_the_smallest_numbers_are_capped_by_the_inputs_dtype(format, dtype):
    """448 / amax overflows FP32 below 1.3e-36."""
    spec = TensorSpec(format=format, scale="fp32", granularity="channel")
    x = torch.tensor([1e-38, 1e-37, 1e-36, 1.3e-36, 1.4e-36, 1e-34, 2e-34], dtype=dtype)[:, None]
    result = quantize(x, spec)
    scales = np.array([te_scale(a, grid_of(spec.dtype)[-1], False, dtype) for a in x[:, 0].float().numpy()])
    assert np.array_equal(result.scale_inv[:, 0].numpy(), np.float32(1.0) / scales)
    assert scales[0] == np.float32(torch.finfo(dtype).max)


def test_scales_equal_sglang_ue8m0_for_every_bf16_amax_from_1e_10():
    """SGLang: 2^ceil(log2(max(amax, 1e-10) / 448)), in FP32 with the reciprocal of 448."""
    amax = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    amax = amax[amax >= 1e-10]
    bits = (amax * torch.tensor(1 / 448, dtype=torch.float32)).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    ue8m0 = (exponent << 23).view(torch.float32)
    ours = quantize(amax[:, None].bfloat16(), TensorSpec(granularity="channel")).scale_inv[:, 0]
    assert torch.equal(ours, ue8m0)


def test_mx_scales_are_one_byte_and_those_of_a_power_of_two_unless_the_largest_value_saturates():
    """TransformerEngine's MXFP8 rounds amax / 448 up to a power of two, which is `pow2` in groups of 32."""
    amax = torch.arange(0x80, 0x7F80, dtype=torch.int16).view(torch.bfloat16)[:, None]
    mx, pow2 = quantize(amax, TensorSpec(group=32, scale="e8m0")), quantize(amax, TensorSpec(group=32))
    assert mx.scale_inv.dtype is torch.float8_e8m0fnu and mx.scale_inv.element_size() == 1
    exponent = np.floor(np.log2(amax.double().numpy())) - 8
    assert np.array_equal(mx.scale_inv.float().numpy(), 2.0 ** np.maximum(exponent, -127))
    saturates = (torch.frexp(amax.float())[0] > 0.875) & (amax.float() > 2.0**-119)
    assert torch.equal(mx.scale_inv.float() * (1 + saturates.float()), pow2.scale_inv)
    assert (mx.data.float()[saturates] == 448).all()


def test_a_static_range_is_one_scale_whatever_the_values_and_saturates_beyond():
    """Qwix's fixed,-224,224: the codes are twice the values."""
    x = torch.tensor([[0.0, 1.0, -224.0, 225.0, 1e30, -math.inf, math.nan, 0.01]]).bfloat16()
    for spec in (TensorSpec(fixed=224), TensorSpec(granularity="tensor", fixed=224.0, scale="fp32")):
        result = quantize(x, spec)
        assert result.scale_inv.tolist() == [[0.5]]
        assert result.data.float()[0, :6].tolist() == [0, 2, -448, 448, 448, -448] and result.data.float()[0, 6].isnan()
        assert result.dequantize()[0, 7] == nearest_even(x[0, 7].double() * 2, E4M3) / 2


def test_zero_nan_and_infinite_blocks():
    x = torch.zeros(4, 128, dtype=torch.bfloat16)
    x[1, 3], x[1, 4] = math.nan, 7.0
    x[2, 5], x[2, 6] = math.inf, 1000.0
    x[3] = math.nan
    result = quantize(x, TensorSpec())
    assert result.scale_inv[:, 0].tolist() == [1.0, 1 / 64, 1.0, 1.0]
    values = result.data.float()
    assert (values[0] == 0).all() and values[1, 3].isnan() and values[1, 4] == 7 * 64
    assert values[2, 5] == 448 and values[2, 6] == 448 and values[3].isnan().all()


def test_leading_dimensions_are_more_rows_or_more_matrices():
    x = torch.randn(3, 128, 256).bfloat16()
    block = quantize(x, TensorSpec(granularity="block"))
    assert block.scale_inv.shape == (3, 1, 2)
    assert torch.equal(block.dequantize()[1], quantize(x[1], TensorSpec(granularity="block")).dequantize())
    assert quantize(x, TensorSpec()).scale_inv.shape == (3, 128, 2)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 260), st.integers(1, 390), st.sampled_from(SPECS), st.booleans())
def test_memory_that_is_used_again_holds_the_same_values(matrices, rows, columns, spec, wide):
    x = torch.randn(matrices, rows, columns)
    result, dtype = quantize(x, spec), torch.float32 if wide else torch.bfloat16
    out = torch.full(x.shape, math.nan, dtype=dtype)
    assert result.dequantize(out=out) is out and torch.equal(out, result.dequantize(dtype))


@pytest.mark.parametrize(
    "spec",
    (TensorSpec(), TensorSpec(format="e5m2"), TensorSpec(group=32, scale="e8m0"), TensorSpec(fixed=224.0)),
    ids=str,
)
@pytest.mark.parametrize("shape", ((1, 128), (5, 256), (128, 128), (300, 384)))
def test_fast_paths_equal_the_quantizer(shape, spec):
    x = torch.randn(*shape).mul(2).exp().bfloat16() * torch.randn(shape[0], 1).sign().bfloat16()
    x[0, :128] = 0
    x[-1, 1], x[-1, 2] = math.inf, math.nan
    assert torch.equal(fake_quantize_rows(x, spec).nan_to_num(-1), fake_quantize(x, spec).nan_to_num(-1))
    columns = fake_quantize(x.t().contiguous(), spec).t()
    assert torch.equal(fake_quantize_columns(x, spec).nan_to_num(-1), columns.nan_to_num(-1))


@pytest.mark.slow
def test_compiled_kernels_give_the_same_bits_and_without_a_compiler_all_runs_as_written(compiled, tmp_path):
    """Every compiled function against the same function uncompiled, in a process of its own (the choice is global)."""
    script = """
import math
import torch
from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.digest import tensor_digest
from fp8rl.numerics.quantize import fake_quantize_columns, fake_quantize_rows
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import TensorSpec
def results():
    x = torch.randn(260, 200, generator=torch.Generator().manual_seed(0)).mul(3).exp().bfloat16()
    x[-1, 3], x[-1, 4], x[0, :128] = math.inf, math.nan, 0
    yield fake_quantize_rows(x, TensorSpec())
    yield fake_quantize_columns(x, TensorSpec())
    yield fake_quantize_rows(x, TensorSpec(group=32, scale="e8m0"))
    yield quantize(x, TensorSpec(rounding="stochastic")).dequantize()
    for spec in (TensorSpec(granularity="block", fixed=224.0), TensorSpec(format="e5m2", scale="fp32")):
        q = quantize(x, spec)
        yield q.data.float()  # the sign of a NaN's code is not defined
        yield q.scale_inv
        yield q.dequantize()
        yield q.dequantize(out=torch.empty(x.shape, dtype=q.dequantize().dtype))
        yield torch.tensor(list(tensor_digest(q.data.float().nan_to_num()).encode()))
plain = list(results())
compiles = enable_compiler()
for a, b in zip(plain, results(), strict=True):
    assert a.dtype == b.dtype and torch.equal(a.nan_to_num(-1.5), b.nan_to_num(-1.5))
graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
# Processes that start at once, each with a temporary folder, share the header: without one lock a half of it was read.
assert torch._inductor.codecache._HEADER_LOCK_DIR.startswith(torch._inductor.codecache.cache_dir())
print("no compiler" if not compiles else "compiled" if graphs > 10 else f"compiled {graphs} graphs only")
"""
    without = {**os.environ, "CXX": "/bin/false", "TMPDIR": f"{tmp_path}", "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/c"}
    for environment, said in ((os.environ, ("compiled", "no compiler")), (without, ("no compiler",))):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=900, env=environment
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() in said
    assert "quantizers run uncompiled" in done.stderr


def test_wrong_inputs_are_refused():
    with pytest.raises(UserError, match="bf16 tensor spec"):
        quantize(torch.zeros(2, 2), TensorSpec(format="bf16"))
    with pytest.raises(UserError, match="float16"):
        quantize(torch.zeros(2, 2, dtype=torch.float16), TensorSpec())
    with pytest.raises(UserError, match="matrix"):
        quantize(torch.zeros(4), TensorSpec(granularity="block"))
