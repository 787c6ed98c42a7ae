"""What the compiler makes of the product kernels, adapters' too, for an H200, which is known without one: what fits,
and that the variants of an op compute the same in their loops over K, so that sums are added in the same order."""

import pytest

from tests.support.sass import arithmetic, named

SCRIPT = """
import dataclasses
import torch
from fp8rl.numerics.quantize import QuantizedTensor, scale_shape
from fp8rl.numerics.spec import TensorSpec
from fp8rl.numerics.kernels.products import tiles as heights
from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.grouped import grouped_wgrad, grouped_wgrad_matmul
from fp8rl.numerics.kernels.products.low_rank import low_rank_product
from fp8rl.numerics.kernels.products.tiles import Tiles
from lab.bench.gpu import specialized
from tests.support.hopper import compiled_only

def tensor(*shape, format="e4m3", granularity="token_group"):
    spec = TensorSpec(format=format, granularity=granularity)
    return QuantizedTensor(torch.empty(shape, dtype=spec.dtype), torch.empty(scale_shape(shape, spec)), spec)

def note(op, launch, *arguments, **more):
    before = len(found)
    launch(*arguments, **more)
    found[before:] = [dataclasses.replace(each, name=op) for each in found[before:]]

half, full = torch.bfloat16, torch.float32
tall = Tiles(*torch.zeros(3, 32, dtype=torch.int32), torch.zeros(9, dtype=torch.int32))
short = dataclasses.replace(tall, height=64)
weight, stack = (tensor(*shape, 1536, 2048, granularity="block") for shape in ((), (8,)))
x, plus = torch.empty(4096, 2048, dtype=half), torch.empty(4096, 1536, dtype=half)
few, rows, a, b = tensor(32, 2048), tensor(4096, 2048), tensor(2048, 4096), tensor(1536, 4096)
with compiled_only(loops=True) as found:
    note("FP8", gemm, rows, weight, half)
    note("FP8 in slices", gemm, rows, weight, half, 2)
    note("FP8 to FP32", gemm, rows, weight, full)
    note("FP8", gemm, rows, stack, half, tiles=tall)
    note("E5M2", gemm, tensor(4096, 2048, format="e5m2"), weight, half)
    note("E5M2", gemm, tensor(4, 2048, format="e5m2"), weight, half)
    note("FP8 gradient", gemm, a, b, full)
    note("FP8 gradient", gemm, tensor(7, 4096), b, full)
    note("FP8 gradient in slices", gemm, a, b, half, 2)
    note("FP8 gradient", grouped_wgrad, a, b, tall, full)
    note("FP8 gradient", grouped_wgrad, a, b, tall, half, torch.empty(8, 2048, 1536))
    note("BF16", gemm, x, torch.empty(8, 1536, 2048, dtype=half), half, tiles=tall)
    note("BF16", gemm, x, x, half)
    heights.ALLOWED[heights.WIDE] = True
    note("BF16, wide", gemm, x, x, half)
    note("BF16, wide to FP32", gemm, x, x, full)
    note("BF16, wide in slices", gemm, x, x, half, 2)
    note("BF16 gradient", gemm, x.t(), x.t(), full)
    note("BF16 gradient", grouped_wgrad_matmul, x, x, tall, full)
    note("BF16 gradient", grouped_wgrad_matmul, x, x, tall, half, torch.empty(8, 2048, 2048))
    note("FP32", gemm, x.float(), x[:128].float(), full)
    note("FP8 plus", gemm, rows, weight, half, plus=plus)
    note("FP8 in slices plus", gemm, rows, weight, half, 2, plus=plus)
    heights.ALLOWED[heights.SHORT] = True
    note("FP8, short", gemm, few, weight, half)
    note("FP8 in slices, short", gemm, few, weight, half, 2)
    note("FP8, short", gemm, tensor(256, 2048), stack, half, tiles=short)
    note("FP8 plus, short", gemm, few, weight, half, plus=plus[:32])
    note("FP8 specialized", specialized.product, rows, weight, half)
    note("FP8 specialized", specialized.product, rows, stack, half, tall)
    note("FP8 specialized gradient", specialized.product, a, b, full)
    note("FP8 specialized gradient", specialized.grouped_wgrad, a, b, tall, full)
    for rank, parts in ((8, 3), (64, 2)):
        note("adapter", low_rank_product, *(y[:, : rank * parts].contiguous() for y in (x, x[:1536])), 2.0, parts, None)
"""


@pytest.mark.slow  # 31 kernels to compile
def test_everything_fits_and_runs_on_the_tensor_core(kernels):
    """227 KiB of shared memory, and no number of a sum outside the registers. One instruction for all products of a
    kind: tiles differ in what they hold, not in how they add. Two tiles of 64 rows fit on a multiprocessor, in its
    65,536 registers: a thread of 128 holds what one of 256 holds of a tile of 128 rows."""
    for kernel in kernels:
        assert kernel["shared"] <= 227 * 1024 and not kernel["spilled"], kernel
        matrix = [name for name in kernel["instructions"] if "mma" in name]
        if kernel["name"] == "FP32":
            assert not matrix and "fma.rn.f32" in kernel["instructions"]
        elif kernel["name"].startswith(("FP8", "E5M2")):
            codes = "e5m2.e4m3" if kernel["name"] == "E5M2" else "e4m3.e4m3"
            assert matrix == [f"wgmma.mma_async.sync.aligned.m64n128k32.f32.{codes}"]
        else:
            assert matrix and all("k16.f32.bf16.bf16" in name for name in matrix)
        if "short" in kernel["name"]:
            assert 2 * kernel["shared"] <= 227 * 1024 and 2 * 128 * kernel["registers"] <= 65536


def step(kernel):
    smallest = min(kernel["arithmetic"], key=lambda loop: sum(loop.values()))
    return [{text: count for text, count in smallest.items() if not text.startswith(("MUFU.RCP", "F2FP"))}]


@pytest.mark.slow
def test_variants_add_up_in_one_order(kernels):
    """Products tall, short, grouped tall and short; gradients of weights dense in FP32 and BF16, of few rows, grouped,
    and added to what is there. Of a gradient a step over K, apart from the tiles' places and the rounding of a finished
    tile, which the compiler draws into some of the loops."""

    for op, count, least in (
        ("FP8", 4, 30), ("FP8 in slices", 2, 30), ("FP8 plus", 2, 30), ("E5M2", 2, 30), ("BF16", 2, 30),
        ("FP8 gradient", 4, 128), ("BF16 gradient", 3, 4),
    ):  # fmt: skip
        variants = [kernel for kernel in kernels if kernel["name"] in (op, f"{op}, short")]
        first, *others = [step(each) if "gradient" in op else each["arithmetic"] for each in variants]
        assert len(variants) == count and all(other == first for other in others), op
        assert len(first) == 2 - ("gradient" in op) and all(sum(loop.values()) >= least for loop in first), op


@pytest.mark.slow
@pytest.mark.parametrize(("op", "like"), [("FP8 specialized", "FP8"), ("FP8 specialized gradient", "FP8 gradient")])
def test_specialised_warps_add_up_in_the_same_order_and_wait_for_tiles_alone(kernels, op, like):
    """The loops of the two groups that multiply. What follows them there is where a group waits for a tile."""
    (ours, *_), theirs = (named(kernels, name) for name in (like, op))
    assert len(theirs) == 2 and all(step(each) == step(ours) for each in theirs)
    assert min(ours["barriers"]) >= 3 and all(each["barriers"][:2] == [0, 0] for each in theirs)
    assert all(each["registers"] <= 168 for each in theirs), "of 384 threads"


LOOP = "/*0000*/ HGMMA.64x8x16.F32.BF16 R0, R20, gdesc[UR8], R0, gsb0 ;\n"
ADDED = "/*0010*/ FADD R4, R1, R2 ;\n/*0020*/ FMUL R9, R1, R1 ;\n/*0030*/ FADD R5, R4, R3 ;"
MASKED = "/*0010*/ FSEL R4, R1, -INF , P0 ;\n/*0030*/ FADD R5, R4, R3 ;"
TWICE = MASKED.replace("*/ FADD", "*/ FSEL R4, R4, -INF , !P3 ;\n/*0040*/ FADD")


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (ADDED, "\n".join(sorted(ADDED.splitlines(), key=lambda line: "FMUL" in line)), True),  # another schedule
        (ADDED, ADDED.replace("R4, R1, R2", "R4, R2, R1.reuse"), True),
        (ADDED, ADDED.replace("R4, R1, R2", "R4, R1, R3").replace("R4, R3 ;", "R4, R2 ;"), False),
        (ADDED, ADDED.replace("R5, R4, R3", "R5, R4, -R3"), False),
        (MASKED, TWICE, True),  # a mask in one step or in two
        (MASKED, MASKED.replace("-INF", "RZ"), False),
        (MASKED, TWICE.replace("R4, R4, -INF", "R4, R4, RZ"), False),
        (MASKED, MASKED.replace("R1", "R2"), False),
    ],
)
def test_another_order_of_a_sum_is_seen_and_another_schedule_is_not(one, other, equal):
    assert (arithmetic(LOOP + one) == arithmetic(LOOP + other)) is equal
