"""Products, adapted ones and experts as ops: kernels against definitions, values and gradients, and themselves."""

import dataclasses

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.ops import ExpertWeights, Fused, LowRank
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec
from tests.support.kernels import DEVICE, GPU, random

POW2, FP32 = QuantSpec.preset("fp8_block_pow2"), QuantSpec.preset("fp8_block_fp32")
E5M2 = POW2.override({"gradient": {"format": "e5m2"}})
# A GPU's FP8 accumulator keeps about 14 bits of the largest product; one rounding of BF16 comes on top.
TOLERANCE = 2**-6 if DEVICE == "cuda" else 2**-7


def both(run):
    """What `run` returns under the definitions and under the kernels."""
    with using("torch"):
        expected = run()
    with using("triton"):
        return list(zip(run(), expected, strict=True))


def assert_close(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    largest = expected.double().abs().max().item()
    assert torch.allclose(found.double(), expected.double(), rtol=TOLERANCE, atol=TOLERANCE * largest / 4)


def assert_close_through_codes(found, expected):
    """As `assert_close`, of FP8 products one after the other.

    A GPU adds up the first in 14 bits, so that some codes of the second are neighbours of the definition's: there the
    norm of the difference is bounded.
    """
    if GPU:
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert (found.double() - expected.double()).norm() < 0.05 * expected.double().norm()
    else:
        assert_close(found, expected)


def with_gradients(result, *leaves):
    result.backward(random(*result.shape, seed=9).to(result.dtype))
    return [result, *(leaf.grad for leaf in leaves)]


@pytest.mark.slow
@pytest.mark.parametrize("backward", ("fp8", "bf16"))
@pytest.mark.parametrize("spec", (POW2, FP32, E5M2), ids=("pow2", "fp32", "e5m2 gradients"))
def test_fp8_linear(spec, backward):
    def run():
        x, w = random(2, 65, 256).requires_grad_(), random(192, 256, seed=1, scale=0.1).requires_grad_()
        operand = ops.trained_operand(w.detach(), spec.weight)
        return with_gradients(ops.fp8_linear(x, w, operand, spec, backward), x, w)

    for found, expected in both(run):
        assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("backward", ("fp8", "bf16"))
def test_slices_of_a_rank_add_up_to_the_product_in_slices(backward):
    """As in a trainer with fewer ranks than slices."""

    def run():
        x, w = random(33, 512).requires_grad_(), random(192, 512, seed=1, scale=0.1).requires_grad_()
        operand = ops.trained_operand(w.detach(), POW2.weight)
        parts = ops.partial_sums(2, x, w, operand, POW2, backward)
        whole = ops.fp8_linear(x.detach(), w.detach(), operand, POW2, backward, k_splits=2)
        assert torch.equal(ops.merge_partials(parts, x.dtype), whole)
        return with_gradients(ops.merge_partials(parts, x.dtype), x, w)

    for found, expected in both(run):
        assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("backward", ("fp8", "bf16"))
def test_norm_and_product_are_the_two_ops(backward):
    def leaves():
        weight = random(128, 256, seed=1, scale=0.1).requires_grad_()
        return random(3, 45, 256).requires_grad_(), random(256, seed=2).requires_grad_(), weight

    def fused():
        x, norm, w = leaves()
        operand = ops.weight_operand(quantize(w.detach(), POW2.weight))
        return with_gradients(ops.norm_fp8_linear(x, norm, 1e-6, w, operand, POW2, backward), x, norm, w)

    def apart():
        x, norm, w = leaves()
        operand = ops.weight_operand(quantize(w.detach(), POW2.weight))
        return with_gradients(ops.fp8_linear(ops.rms_norm(x, norm, 1e-6), w, operand, POW2, backward), x, norm, w)

    for found, expected in both(fused):
        assert_close(found, expected)
    with using("triton"):
        assert all(torch.equal(a, b) for a, b in zip(fused(), apart(), strict=True))


@pytest.mark.parametrize("backward", ("fp8", "bf16"))
def test_no_tokens(backward):
    """As on an expert-parallel rank whose experts nobody chose."""
    w13, w2 = random(2, 256, 256, seed=1).requires_grad_(), random(2, 256, 128, seed=2).requires_grad_()
    x, counts = random(0, 256).requires_grad_(), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with using("triton"):
        first, second = (ExpertWeights(w, ops.weight_operand(quantize(w.detach(), POW2.weight))) for w in (w13, w2))
        leaf = with_gradients(ops.experts(x, counts, first, second, POW2, backward), x, w13, w2)
        out = ops.fp8_linear(x, w13[0], ops.weight_operand(quantize(w13[0].detach(), POW2.weight)), POW2, backward)
    assert [tuple(t.shape) for t in leaf] == [(0, 256), (0, 256), (2, 256, 256), (2, 256, 128)]
    assert not leaf[2].any() and not leaf[3].any() and out.shape == (0, 256)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_linear(dtype):
    def run():
        x, w = random(2, 9, 256, dtype=dtype).requires_grad_(), random(100, 256, seed=1).requires_grad_()
        return with_gradients(ops.linear(x, w), x, w)

    for found, expected in both(run):
        assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("backward", ("fp8", "bf16"))
@pytest.mark.parametrize("spec", (None, POW2), ids=("bf16", "fp8"))
def test_experts(spec, backward):
    counts = torch.tensor([5, 0, 130, 1], device=DEVICE)

    def run():
        x = random(136, 256).requires_grad_()
        w13, w2 = (random(4, 256, k, seed=k, scale=0.1).requires_grad_() for k in (256, 128))
        first, second = (ExpertWeights(weights, operand(weights)) for weights in (w13, w2))
        return with_gradients(ops.experts(x, counts, first, second, spec, backward), x, w13, w2)

    def operand(weights):
        return None if spec is None else ops.trained_operand(weights.detach(), spec.weight)

    for found, expected in both(run):
        if spec is None:
            assert_close(found, expected)
        else:
            assert_close_through_codes(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "backward"), ((None, "bf16"), (POW2, "fp8"), (POW2, "bf16")))
@pytest.mark.parametrize("implementation", ("torch", "triton"))
def test_gradients_are_those_of_each_expert_alone_and_go_where_they_are_added_up(implementation, spec, backward):
    counts, x, dy = torch.tensor([5, 0, 9, 1], device=DEVICE), random(15, 128), random(15, 128, seed=4)
    stacks = [random(4, *shape, seed=3, scale=0.1) for shape in ((256, 128), (128, 128))]
    starts = [random(*stack.shape, seed=5, dtype=torch.float32) for stack in stacks]

    def gradients(some, given, rows=slice(None)):
        operands = [None if spec is None else ops.trained_operand(each.detach(), spec.weight) for each in given]
        ops.experts(x[rows], some, *map(ExpertWeights, given, operands), spec, backward).backward(dy[rows])
        return [each.grad for each in given]

    with using(implementation):
        whole = gradients(counts, [stack.clone().requires_grad_() for stack in stacks])
        for expert, end in enumerate(counts.cumsum(0).tolist()):
            rows, alone = slice(end - int(counts[expert]), end), [s[[expert]].requires_grad_() for s in stacks]
            found = gradients(counts[[expert]], alone, rows)
            assert all(torch.equal(each[expert], one[0]) for each, one in zip(whole, found, strict=True))
        summed = [stack.clone().requires_grad_() for stack in stacks]
        for stack, start in zip(summed, starts, strict=True):
            stack.main_grad = start.clone()
        assert gradients(counts, summed) == [None, None]
    for stack, start, together in zip(summed, starts, whole, strict=True):
        assert torch.equal(stack.main_grad, start + together.float())


K, RANK, SCALE = 128, 8, 2.0


def adapter(n, parts=1, experts=(), k=K, rank=RANK):
    a = random(*experts, parts * rank, k, seed=5, scale=k**-0.5).requires_grad_()
    b, rows = random(*experts, n, rank, seed=6), torch.arange(n)
    fused = Fused.of(rows, rows // 8 % parts, n, parts, rank)
    index = fused.index.to(b.device)
    return LowRank(a, dataclasses.replace(fused, index=index).wide(b).requires_grad_(), SCALE, parts)


@pytest.mark.slow
@pytest.mark.parametrize("spec", (None, POW2), ids=("bf16", "pow2"))
def test_an_adapted_product(spec):
    def run():
        x, w, low_rank = random(2, 70, K).requires_grad_(), random(192, K, seed=1, scale=0.1), adapter(192, 2)
        plus = ops.low_rank_of(x, low_rank)
        if spec is None:
            y = ops.linear(x, w, plus=plus)
        else:
            y = ops.fp8_linear(x, w, ops.trained_operand(w, spec.weight), spec, plus=plus)
        return with_gradients(y, x, low_rank.a, low_rank.b)

    for found, expected in both(run):
        assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("shared", (False, True), ids=("of each expert", "of all experts"))
def test_adapted_experts(shared):
    experts, width, own = 3, 128, () if shared else (3,)
    counts = torch.tensor([60, 0, 20])

    def run():
        x = random(80, K).requires_grad_()
        stacks = (random(experts, n, k, seed=n, scale=0.1) for n, k in ((2 * width, K), (K, width)))
        adapters = adapter(2 * width, 2, own), adapter(K, 1, own, width)
        w13, w2 = (
            ExpertWeights(stack, ops.trained_operand(stack, POW2.weight), low_rank)
            for stack, low_rank in zip(stacks, adapters, strict=True)
        )
        y = ops.experts(x, counts.to(x.device), w13, w2, POW2)
        return with_gradients(y, x, *(t for each in adapters for t in (each.a, each.b)))

    for found, expected in both(run):
        assert_close_through_codes(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("spec", (None, POW2), ids=("bf16", "pow2"))
def test_adapted_products_of_heads(spec, transposed):
    """And of some tokens and one head alone, which have the same bits."""
    place = 60, 32, transposed

    def product(x, w, low_rank):
        operand = None if spec is None else ops.weight_operand(quantize(w, spec.weight))
        return ops.head_linear(x, w, operand, *place, ops.head_term(x, low_rank, *place))

    def run():
        x, w, low_rank = random(70, 4, 32 if transposed else K), random(4 * 96, K, seed=1, scale=0.1), adapter(4 * 96)
        y = product(x.requires_grad_(), w, low_rank)
        assert torch.equal(product(x[50:53], w, low_rank), y[50:53])
        if spec is None:
            assert torch.equal(product(x[:, 3:], w[288:], dataclasses.replace(low_rank, b=low_rank.b[288:])), y[:, 3:])
        return with_gradients(y, x, low_rank.a, low_rank.b)

    for found, expected in both(run):
        assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize("rank", (8, 24), ids=("less than an instruction", "between two"))
def test_a_row_has_the_same_bits_in_every_batch_and_every_fusion(rank):
    """In any order of the matrices' rows. An expert's row too: it is that of its matrices alone."""
    n = 192
    x, w, low_rank = random(140, K), random(n, K, seed=1, scale=0.1), adapter(n, 3, rank=rank)
    stacked = dataclasses.replace(low_rank, a=low_rank.a[None], b=low_rank.b[None])
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).to(x.device)
    with torch.no_grad():
        operand = ops.weight_operand(quantize(w, POW2.weight))
        plus = ops.low_rank_of(x, low_rank)
        whole = ops.fp8_linear(x, w, operand, POW2, plus=plus)
        for rows in (slice(0, 1), slice(100, 131)):
            alone = ops.fp8_linear(x[rows], w, operand, POW2, plus=ops.low_rank_of(x[rows], low_rank))
            assert torch.equal(alone, whole[rows])
        h = ops.linear(x, low_rank.a)
        groups = torch.tensor([len(x)], device=x.device)
        assert torch.equal(ops.grouped_low_rank_term(h, groups, stacked.b, SCALE, 3), plus)
        together, shuffled = ops.linear(x, w, plus=plus), dataclasses.replace(low_rank, b=low_rank.b[order])
        assert torch.equal(ops.linear(x, w[order], plus=ops.low_rank_of(x, shuffled)), together[:, order])
        for part in range(3):
            mine, its = (torch.arange(n) // 8 % 3 == part).to(x.device), slice(part * rank, (part + 1) * rank)
            alone = ops.low_rank_of(x, LowRank(low_rank.a[its], low_rank.b[mine][:, its], SCALE))
            assert torch.equal(alone, plus[:, mine])
            assert torch.equal(ops.linear(x, w[mine], plus=alone), together[:, mine])


@pytest.mark.slow
@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize("k_splits", (1, 2))
@pytest.mark.parametrize("spec", (None, POW2, FP32), ids=("bf16", "pow2", "fp32"))
def test_a_row_without_the_adapter_has_every_bit_of_the_product_alone(spec, k_splits):
    """Zeros and their signs too: of rows of zeros, and of matrices of zeros and of -0."""
    x, w, low_rank = random(70, 256), random(64, 256, seed=1, scale=0.1), adapter(64, 3, k=256)
    x[::7], w[::5], w[1::5] = 0.0, 0.0, -0.0
    some = dataclasses.replace(low_rank, rows=torch.arange(79, device=x.device) % 3 != 1)
    with torch.no_grad():
        terms = [ops.low_rank_of(x, each, k_splits) for each in (low_rank, some)]
        if spec is None:
            made = [ops.linear(x, w, k_splits, plus) for plus in (None, *terms)]
        else:
            held = w, ops.weight_operand(quantize(w, spec.weight)), spec, "bf16", k_splits
            made = [ops.fp8_linear(x, *held, plus) for plus in (None, *terms)]
    alone, whole, found = (each.view(torch.int16) for each in made)
    assert torch.equal(found, torch.where(some.rows[:70, None], whole, alone)) and not torch.equal(whole, alone)
