"""The variants of an op compute the same in their loops over tokens or K, as compiled for an H200: the same
instructions, each of the same operands, so that sums are added in the same order. Attention: in its own files."""

from __future__ import annotations

import pytest

from tests.support.elsewhere import found_elsewhere
from tests.support.sass import arithmetic

SCRIPT = """
import dataclasses, json
import torch
from fp8rl.numerics.kernels import gated_delta, short_conv
from fp8rl.numerics.kernels.products import tiles
from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.grouped import grouped_gemm, grouped_wgrad, grouped_wgrad_matmul
from fp8rl.numerics.kernels.quantize import empty_blocks, empty_rows
from fp8rl.numerics.quantize import QuantizedTensor, scale_shape
from fp8rl.numerics.spec import TensorSpec
from tests.support.hopper import compiled_only

half, full = torch.bfloat16, torch.float32

def tensor(*shape, dtype=half):
    return torch.zeros(*shape, dtype=dtype)

def note(op, launch, *arguments):
    found.clear()
    launch(*arguments)
    variants.setdefault(op, []).extend(each.arithmetic for each in found)

variants = {}
with compiled_only(loops=True) as found:
    CALLS
print(json.dumps(variants))
"""

PRODUCTS = """
    def rows(count):
        return empty_rows((count, 512), TensorSpec(), "cpu")

    def groups(*shape, format="e4m3"):
        spec = TensorSpec(format=format)
        return QuantizedTensor(torch.empty(shape, dtype=spec.dtype), torch.empty(scale_shape(shape, spec)), spec)

    tiles.allow_short(True)
    blocks = TensorSpec(granularity="block")
    dense, stack = (empty_blocks(shape, blocks, "cpu") for shape in ((384, 512), (3, 384, 512)))
    tall, short = (tiles.make_tiles(torch.zeros(3, dtype=torch.int64), 300, height) for height in (128, 64))
    for count in (300, 7):
        note("FP8", gemm, rows(count), dense, half)
        note("FP8 in slices", gemm, rows(count), dense, half, 2)
        note("gradient E5M2 of rows", gemm, groups(count, 512, format="e5m2"), dense, half)
    for some in (tall, short):
        note("FP8", grouped_gemm, rows(300), stack, some, half)
    note("BF16", gemm, tensor(300, 512), tensor(384, 512), half)
    note("BF16", grouped_gemm, tensor(300, 512), tensor(3, 384, 512), tall, half)

    columns = 128 * tall.expert.numel()
    a, b, total = groups(384, columns), groups(512, columns), tensor(3, 384, 512, dtype=full)
    for dtype, count in ((full, 384), (half, 384), (full, 7)):
        note("FP8 gradient of a weight", gemm, groups(count, columns), b, dtype)
    note("FP8 gradient of a weight", grouped_wgrad, a, b, tall, full)
    note("FP8 gradient of a weight", grouped_wgrad, a, b, tall, half, total)
    note("BF16 gradient of a weight", gemm, tensor(384, 304), tensor(512, 304), full)
    note("BF16 gradient of a weight", grouped_wgrad_matmul, tensor(300, 384), tensor(300, 512), tall, full)
    note("BF16 gradient of a weight", grouped_wgrad_matmul, tensor(300, 384), tensor(300, 512), tall, half, total)
"""
LINEAR = """
    state, kept = tensor(300, 32, 128, 128, dtype=full), tensor(300, 3, 8192)
    for tokens, sequences in ((8192, 1), (1, 1), (257, 257)):
        lengths, begun = torch.full((sequences,), tokens // sequences), torch.ones(sequences, dtype=torch.bool)
        q, v, g = tensor(tokens, 16, 128), tensor(tokens, 32, 128), tensor(tokens, 32, dtype=full)
        x, weight, where = tensor(tokens, 8192), tensor(8192, 4), (torch.arange(sequences), lengths, begun)
        note("gated delta rule", gated_delta.gated_delta_rule, q, q, v, g, g, lengths)
        note("gated delta rule", gated_delta.paged_gated_delta_rule, q, q, v, g, g, state, *where)
        note("convolution", short_conv.causal_conv, x, weight, lengths)
        note("convolution", short_conv.paged_causal_conv, x, weight, kept, *where)
"""


def variants(calls):
    """Of each op the variants that these calls compile, each with what its loops compute."""
    return found_elsewhere(SCRIPT.replace("    CALLS", calls))


def equal(op, loops, count):
    first, *others = loops
    assert len(loops) == count, op
    for place, other in enumerate(others, 1):
        assert other == first, f"{op}: variant {place}"
    return first


def of_step(loops):
    """What a step over K computes, apart from the tiles' places and the rounding of a finished tile, which the compiler
    draws into some of the loops."""
    smallest = min(loops, key=lambda loop: sum(loop.values()))
    return {text: count for text, count in smallest.items() if not text.startswith(("MUFU.RCP", "F2FP"))}


@pytest.mark.slow  # 18 kernels to compile
def test_products_and_the_gradients_of_their_operands_add_up_in_one_order():
    """Products tall, short, grouped tall and short; gradients of weights dense in FP32 and BF16, of few rows, grouped,
    and added to what is there."""
    found = variants(PRODUCTS)
    for op, count in (("FP8", 4), ("FP8 in slices", 2), ("gradient E5M2 of rows", 2), ("BF16", 2)):
        assert len(equal(op, found[op], count)) == 2 and all(sum(loop.values()) > 30 for loop in found[op][0]), op
    for op, count, least in (("FP8", 5, 128), ("BF16", 3, 4)):
        op = f"{op} gradient of a weight"
        assert sum(equal(op, [of_step(loops) for loops in found[op]], count).values()) >= least, op


@pytest.mark.slow  # 4 kernels to compile
def test_linear_attention_adds_up_in_one_order():
    """A row of 8,192 tokens, decode of one and of 257 requests, each in the trainer and over an engine's states."""
    found = variants(LINEAR)
    (rule,) = equal("gated delta rule", found["gated delta rule"], 6)
    # A program finds its sequence by adding up lengths, of all threads; channels are summed in a thread.
    channels = [{text: n for text, n in whole.items() if "SHFL" not in text} for (whole,) in found["convolution"]]
    assert sum(rule.values()) > 200 and sum(equal("convolution", channels, 6).values()) > 200


LOOP = "/*0000*/ HGMMA.64x8x16.F32.BF16 R0, R20, gdesc[UR8], R0, gsb0 ;\n"
ADDED = "/*0010*/ FADD R4, R1, R2 ;\n/*0020*/ FMUL R9, R1, R1 ;\n/*0030*/ FADD R5, R4, R3 ;"


def test_another_order_of_a_sum_is_seen_and_another_schedule_is_not():
    sum_of_three, later = (
        arithmetic(LOOP + ADDED),
        "\n".join(sorted(ADDED.splitlines(), key=lambda line: "FMUL" in line)),
    )
    assert arithmetic(LOOP + later) == sum_of_three
    assert arithmetic(LOOP + ADDED.replace("R4, R1, R2", "R4, R2, R1.reuse")) == sum_of_three
    assert arithmetic(LOOP + ADDED.replace("R4, R1, R2", "R4, R1, R3").replace("R4, R3 ;", "R4, R2 ;")) != sum_of_three
    assert arithmetic(LOOP + ADDED.replace("R5, R4, R3", "R5, R4, -R3")) != sum_of_three


def test_a_mask_in_one_step_or_in_two_is_the_same_and_another_number_is_not():
    masked = "/*0010*/ FSEL R4, R1, -INF , P0 ;\n/*0030*/ FADD R5, R4, R3 ;"
    twice = masked.replace("*/ FADD", "*/ FSEL R4, R4, -INF , !P3 ;\n/*0040*/ FADD")
    assert arithmetic(LOOP + twice) == arithmetic(LOOP + masked)
    for other in (
        masked.replace("-INF", "RZ"),
        twice.replace("R4, R4, -INF", "R4, R4, RZ"),
        masked.replace("R1", "R2"),
    ):
        assert arithmetic(LOOP + other) != arithmetic(LOOP + masked)
