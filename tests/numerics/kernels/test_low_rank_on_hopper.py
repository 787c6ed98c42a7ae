"""What the compiler makes of adapted products for an H200, and what a decode step launches for them."""

from typing import Any

import pytest

from tests.support.hopper import compiled_elsewhere, found_elsewhere

COMPILED = """
import torch
from fp8rl.numerics.kernels.products import tiles as heights
from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.low_rank import low_rank_term
from fp8rl.numerics.quantize import QuantizedTensor, scale_shape
from fp8rl.numerics.spec import TensorSpec
from tests.support.hopper import compiled_only

def tensor(*shape, granularity="token_group"):
    spec = TensorSpec(granularity=granularity)
    return QuantizedTensor(torch.empty(shape, dtype=spec.dtype), torch.empty(scale_shape(shape, spec)), spec)

half = torch.bfloat16
weight, plus = tensor(1536, 2048, granularity="block"), torch.empty(4096, 1536, dtype=half)
with compiled_only() as found:
    gemm(tensor(4096, 2048), weight, half, plus=plus)
    gemm(tensor(4096, 2048), weight, half, 2, plus=plus)
    low_rank_term(torch.empty(4096, 24, dtype=half), torch.empty(1536, 24, dtype=half), 2.0, 3)
    low_rank_term(torch.empty(4096, 128, dtype=half), torch.empty(1536, 128, dtype=half), 2.0, 2)
    heights.allow_short(True)
    gemm(tensor(32, 2048), weight, half, plus=plus[:32])
"""

LAUNCHED = """
import json
import torch
from fp8rl.numerics import ops
from fp8rl.numerics.backend.dispatch import using
from fp8rl.numerics.ops import ExpertWeights, LowRank
from fp8rl.numerics.spec import QuantSpec
from tests.support.launches import launches

SPEC, META = QuantSpec.preset("fp8_block_pow2"), torch.device("meta")

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device=META)

def adapter(n, k, parts=1, experts=()):
    return LowRank(empty(*experts, parts * 8, k), empty(*experts, n, parts * 8), 2.0, parts)

def counted(call):
    with launches() as found:
        call()
    return found.total

with using("triton"), torch.no_grad():
    x, w, counts = empty(256, 2048), empty(1536, 2048), empty(8, dtype=torch.int64)
    w13, w2 = empty(8, 1536, 2048), empty(8, 2048, 768)
    with launches():
        operand = ops.trained_operand(w, SPEC.weight)
        operands = [ops.group_operand(stack, SPEC.weight) for stack in (w13, w2)]

    def experts(*adapters):
        weights = [ExpertWeights(*each) for each in zip((w13, w2), operands, adapters)]
        ops.experts(x, counts, *weights, SPEC)

    plain = counted(lambda: ops.fp8_linear(x, w, operand, SPEC))
    adapted = counted(lambda: ops.adapted_fp8_linear(x, w, operand, SPEC, adapter(1536, 2048, 3)))
    without = counted(lambda: experts(None, None))
    of_each = counted(lambda: experts(adapter(1536, 2048, 2, (8,)), adapter(2048, 768, 1, (8,))))
    of_all = counted(lambda: experts(adapter(1536, 2048, 2), adapter(2048, 768)))
print(json.dumps({"product": adapted - plain, "of each": of_each - without, "of all": of_all - without}))
"""


@pytest.mark.slow  # five kernels to compile
def test_everything_fits() -> None:
    """227 KiB of shared memory, and no number of a sum outside the registers."""
    kernels = compiled_elsewhere(COMPILED)
    assert len(kernels) == 5
    for kernel in kernels:
        assert kernel["shared"] <= 227 * 1024 and not kernel["spilled"], kernel
        assert any("mma" in name for name in kernel["instructions"]), kernel


@pytest.mark.slow
def test_an_adapter_costs_a_product_two_launches() -> None:
    """Its own two; experts add the tiles of each, and SwiGLU is not quantized where it is computed."""
    found: Any = found_elsewhere(LAUNCHED)
    assert found["product"] == 2 and found["of each"] <= 14 and found["of all"] <= 8, found
