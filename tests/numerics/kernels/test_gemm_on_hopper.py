"""What the compiler makes of the product kernels, adapters' too, for an H200, which is known without one."""

import pytest

from tests.support.elsewhere import compiled_elsewhere

pytestmark = pytest.mark.slow  # 23 kernels to compile

SCRIPT = """
import dataclasses
import torch
from fp8rl.numerics.quantize import QuantizedTensor, scale_shape
from fp8rl.numerics.spec import TensorSpec
from fp8rl.numerics.kernels.products import tiles as heights
from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.grouped import grouped_gemm, grouped_wgrad, grouped_wgrad_matmul
from fp8rl.numerics.kernels.products.low_rank import low_rank_product
from fp8rl.numerics.kernels.products.tiles import Tiles
from tests.support.hopper import compiled_only

def tensor(*shape, format="e4m3", granularity="token_group"):
    spec = TensorSpec(format=format, granularity=granularity)
    return QuantizedTensor(torch.empty(shape, dtype=spec.dtype), torch.empty(scale_shape(shape, spec)), spec)

half, full = torch.bfloat16, torch.float32
tiles = Tiles(*torch.zeros(3, 32, dtype=torch.int32), torch.zeros(9, dtype=torch.int32))
x, weight = torch.empty(4096, 2048, dtype=half), tensor(1536, 2048, granularity="block")
with compiled_only() as found:
    gemm(tensor(4096, 2048), weight, half)
    gemm(tensor(4096, 2048), weight, half, 2)
    gemm(tensor(4096, 2048), weight, full)
    gemm(tensor(2048, 4096), tensor(1536, 4096), full)
    gemm(tensor(2048, 4096), tensor(1536, 4096), half, 2)
    grouped_gemm(tensor(4096, 2048), tensor(8, 1536, 2048, granularity="block"), tiles, half)
    grouped_wgrad(tensor(2048, 4096), tensor(1536, 4096), tiles, full)
    gemm(tensor(4096, 2048, format="e5m2"), weight, half)
    heights.allow_wide(True)
    for out, splits in ((half, 1), (full, 1), (half, 2)):
        gemm(x, x, out, splits)
    grouped_wgrad_matmul(x, x, tiles, full)
    gemm(x.float(), x[:128].float(), full)
    heights.allow_short(True)
    gemm(tensor(32, 2048), weight, half)
    gemm(tensor(32, 2048), weight, half, 2)
    short = dataclasses.replace(tiles, height=64)
    grouped_gemm(tensor(256, 2048), tensor(8, 1536, 2048, granularity="block"), short, half)
    total = torch.empty(8, 2048, 1536)
    grouped_wgrad(tensor(2048, 4096), tensor(1536, 4096), tiles, half, total)
    grouped_wgrad_matmul(x, x, tiles, half, torch.empty(8, 2048, 2048))
    plus = torch.empty(4096, 1536, dtype=half)
    gemm(tensor(32, 2048), weight, half, plus=plus[:32])
    heights.allow_short(False)
    gemm(tensor(4096, 2048), weight, half, plus=plus)
    gemm(tensor(4096, 2048), weight, half, 2, plus=plus)
    for rank, parts in ((8, 3), (64, 2)):
        low_rank_product(x[:, : rank * parts], x[:1536, : rank * parts], 2.0, parts, None)
"""


@pytest.fixture(scope="module")
def kernels():
    return compiled_elsewhere(SCRIPT)


def test_everything_fits(kernels):
    """227 KiB of shared memory, and no number of a sum outside the registers."""
    assert len(kernels) == 23
    for kernel in kernels:
        assert kernel["shared"] <= 227 * 1024 and not kernel["spilled"], kernel


def test_products_run_on_the_tensor_core(kernels):
    """One instruction for all products of a kind: tiles differ in what they hold, not in how they add."""
    matrix = [[name for name in kernel["instructions"] if "mma" in name] for kernel in kernels]
    shape = "wgmma.mma_async.sync.aligned.m64n128k32.f32."
    assert matrix[:7] == [[shape + "e4m3.e4m3"]] * 7 and matrix[7] == [shape + "e5m2.e4m3"]
    assert all("k16.f32.bf16.bf16" in name for names in matrix[8:12] for name in names) and all(matrix[8:12])
    assert not matrix[12] and "fma.rn.f32" in kernels[12]["instructions"]
    assert matrix[13:17] == [[shape + "e4m3.e4m3"]] * 4 and "k16.f32.bf16.bf16" in matrix[17][0]
    assert matrix[18:21] == [[shape + "e4m3.e4m3"]] * 3 and all(matrix[21:])


def test_two_tiles_of_64_rows_fit_on_a_multiprocessor(kernels):
    """In its 65,536 registers and 227 KiB; a thread of 128 holds what one of 256 holds of a tile of 128 rows."""
    for kernel in kernels[13:16]:
        assert 2 * kernel["shared"] <= 227 * 1024 and 2 * 128 * kernel["registers"] <= 65536
