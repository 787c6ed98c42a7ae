"""The variants of an op compute the same in their loops over keys or K, as compiled for an H200: the same instructions,
each of the same operands, so that sums are added in the same order."""

import pytest

from tests.support.hopper import compiled_elsewhere
from tests.support.sass import arithmetic

SCRIPT = """
import torch
from fp8rl.numerics.kernels.attention.forward import attention, packed_attention, paged_attention
from fp8rl.numerics.kernels.products import tiles
from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.grouped import grouped_gemm
from fp8rl.numerics.kernels.quantize import empty_blocks, empty_rows
from fp8rl.numerics.spec import TensorSpec
from tests.support.hopper import compiled_only

def tensor(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)

def rows(count):
    return empty_rows((count, 512), TensorSpec(), "cpu")

tiles.allow_short(True)
dense, stack = (empty_blocks(shape, TensorSpec(granularity="block"), "cpu") for shape in ((384, 512), (3, 384, 512)))
each, cache, table = torch.full((4,), 64), tensor(100, 4, 128), tensor(4, 512, dtype=torch.int32)
with compiled_only() as found:
    tall, short = (tiles.make_tiles(torch.zeros(3, dtype=torch.int64), 300, height) for height in (128, 64))
    found.clear()
    paged_attention(tensor(4, 32, 128), cache, cache, table, each, None, each, 0.1)
    paged_attention(tensor(4, 4, 128), cache, cache, table, each, None, each, 0.1)
    paged_attention(tensor(256, 32, 128), cache, cache, table, each, each.int(), each, 0.1)
    attention(tensor(1, 256, 32, 128), *[tensor(1, 256, 4, 128)] * 2, torch.zeros(1, 256).long(), 0.1)
    packed_attention(tensor(256, 32, 128), *[tensor(256, 4, 128)] * 2, each, 0.1)
    gemm(rows(300), dense, torch.bfloat16)
    gemm(rows(7), dense, torch.bfloat16)
    grouped_gemm(rows(300), stack, tall, torch.bfloat16)
    grouped_gemm(rows(300), stack, short, torch.bfloat16)
    gemm(rows(300), dense, torch.bfloat16, 2)
    gemm(rows(7), dense, torch.bfloat16, 2)
    gemm(tensor(300, 512), tensor(384, 512), torch.bfloat16)
    grouped_gemm(tensor(300, 512), tensor(3, 384, 512), tall, torch.bfloat16)
"""
VARIANTS = {
    "attention: decode, of one head, prefill, contiguous, packed": 5,
    "FP8 products: tall, short, grouped tall and short": 4,
    "FP8 products in slices: tall, short": 2,
    "BF16 products: dense, grouped": 2,
}


@pytest.mark.slow  # 13 kernels to compile
def test_variants_of_an_op_add_up_in_one_order():
    loops = [kernel["arithmetic"] for kernel in compiled_elsewhere(SCRIPT) if kernel["name"] != "_merge_kernel"]
    assert len(loops) == sum(VARIANTS.values())
    for op, count in VARIANTS.items():
        first, *others = (loops.pop(0) for _ in range(count))
        assert len(first) == 2 and all(sum(loop.values()) > 30 for loop in first), op
        for place, other in enumerate(others, 1):
            assert other == first, f"{op}: variant {place}"


ADDED = "/*0010*/ FADD R4, R1, R2 ;\n/*0020*/ FMUL R9, R1, R1 ;\n/*0030*/ FADD R5, R4, R3 ;"


def test_another_order_of_a_sum_is_seen_and_another_schedule_is_not():
    loop = "/*0000*/ HGMMA.64x8x16.F32.BF16 R0, R20, gdesc[UR8], R0, gsb0 ;\n"
    sum_of_three, later = (
        arithmetic(loop + ADDED),
        "\n".join(sorted(ADDED.splitlines(), key=lambda line: "FMUL" in line)),
    )
    assert arithmetic(loop + later) == sum_of_three
    assert arithmetic(loop + ADDED.replace("R4, R1, R2", "R4, R2, R1.reuse")) == sum_of_three
    assert arithmetic(loop + ADDED.replace("R4, R1, R2", "R4, R1, R3").replace("R4, R3 ;", "R4, R2 ;")) != sum_of_three
    assert arithmetic(loop + ADDED.replace("R5, R4, R3", "R5, R4, -R3")) != sum_of_three
