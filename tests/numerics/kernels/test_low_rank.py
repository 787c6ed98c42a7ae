"""Adapted products as kernels: against their definitions, values and gradients, and against themselves."""

import dataclasses

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.ops import ExpertWeights, Fused, LowRank
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec
from tests.numerics.kernels.test_products import assert_close, assert_close_through_codes, both, with_gradients
from tests.support.kernels import random

POW2 = QuantSpec.preset("fp8_block_pow2")
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
        if spec is None:
            y = ops.adapted_linear(x, w, low_rank)
        else:
            y = ops.adapted_fp8_linear(x, w, ops.trained_operand(w, spec.weight), spec, low_rank)
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
            ExpertWeights(stack, ops.group_operand(stack, POW2.weight), low_rank)
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
@pytest.mark.parametrize("rank", (8, 24), ids=("less than an instruction", "between two"))
def test_a_row_has_the_same_bits_in_every_batch_and_every_fusion(rank):
    """An expert's row too: it is that of its matrices alone."""
    n = 192
    x, w, low_rank = random(140, K), random(n, K, seed=1, scale=0.1), adapter(n, 3, rank=rank)
    stacked = dataclasses.replace(low_rank, a=low_rank.a[None], b=low_rank.b[None])
    with using("triton"), torch.no_grad():
        operand = ops.weight_operand(quantize(w, POW2.weight))
        whole = ops.adapted_fp8_linear(x, w, operand, POW2, low_rank)
        for rows in (slice(0, 1), slice(100, 131)):
            assert torch.equal(ops.adapted_fp8_linear(x[rows], w, operand, POW2, low_rank), whole[rows])
        plus = ops.low_rank_of(x, low_rank)
        h = ops.linear(x, low_rank.a)
        groups = torch.tensor([len(x)], device=x.device)
        assert torch.equal(ops.grouped_low_rank_term(h, groups, stacked.b, SCALE, 3), plus)
        for part in range(3):
            mine, its = torch.arange(n) // 8 % 3 == part, slice(part * rank, (part + 1) * rank)
            alone = LowRank(low_rank.a[its], low_rank.b[mine.to(x.device)][:, its], SCALE)
            assert torch.equal(ops.low_rank_of(x, alone), plus[:, mine.to(x.device)])


@pytest.mark.slow
@pytest.mark.parametrize("spec", (None, POW2), ids=("bf16", "pow2"))
def test_a_row_without_the_adapter_has_every_bit_of_the_product_alone(spec):
    x, w, low_rank = random(70, K), random(64, K, seed=1, scale=0.1), adapter(64)
    x[::7] = 0.0
    rows = torch.arange(70, device=x.device) % 3 != 1
    some = dataclasses.replace(low_rank, rows=rows)
    with using("triton"), torch.no_grad():
        if spec is None:
            alone, found = ops.linear(x, w), ops.adapted_linear(x, w, some)
        else:
            operand = ops.weight_operand(quantize(w, spec.weight))
            alone, found = ops.fp8_linear(x, w, operand, spec), ops.adapted_fp8_linear(x, w, operand, spec, some)
    same = (found.view(torch.int16) == alone.view(torch.int16)).all(1)
    assert same[~rows].all() and not same[rows & x.any(1)].any()
