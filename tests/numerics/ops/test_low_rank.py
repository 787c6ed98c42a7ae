"""Adapted products: values against their definition, gradients against float64, the same row in every batch and
fusion."""

import dataclasses

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.ops import ExpertWeights, Fused, LowRank, grouped
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec

POW2, FP32 = QuantSpec.preset("fp8_block_pow2"), QuantSpec.preset("fp8_block_fp32")
TOKENS, K, N, RANK, SCALE = 150, 256, 384, 8, 2.0
EXPERTS = 4


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def part_of(n, parts):
    return torch.arange(n) // 8 % parts


def adapter(parts=1, experts=(), k=K, n=N):
    a, b = randn(*experts, parts * RANK, k) / k**0.5, randn(*experts, n, RANK)
    return LowRank(a, Fused.of(torch.arange(n), part_of(n, parts), n, parts, RANK).wide(b), SCALE, parts)


def operands(tokens=TOKENS, k=K, n=N):
    return randn(tokens, k), randn(n, k, seed=1) / k**0.5


def leaves(low_rank):
    a, b = (t.clone().requires_grad_() for t in (low_rank.a, low_rank.b))
    return dataclasses.replace(low_rank, a=a, b=b)


def close(found, expected):
    assert (found.double() - expected).abs().max() <= 2**-6 * expected.abs().max()


@pytest.mark.parametrize("parts", (1, 3))
@pytest.mark.parametrize("spec", (None, POW2, FP32), ids=("bf16", "pow2", "fp32"))
@pytest.mark.parametrize("k_splits", (1, 2))
def test_an_adapted_product_and_its_gradients(parts, spec, k_splits):
    (x, weight), low_rank = operands(), leaves(adapter(parts))
    x.requires_grad_()
    dy, plus = randn(TOKENS, N, seed=2), ops.low_rank_of(x, low_rank, k_splits)
    if spec is None:
        y, served = ops.linear(x, weight, k_splits, plus), weight.double()
        seen = x.detach().double()
    else:
        quantized, activation = quantize(weight, spec.weight), quantize(x.detach(), spec.activation)
        served, seen = quantized.dequantize(torch.float64), activation.dequantize(torch.float64)
        y = ops.fp8_linear(x, weight, ops.weight_operand(quantized), spec, "bf16", k_splits, plus)
    y.backward(dy)
    a, b, rows, dy = low_rank.a.detach().double(), low_rank.b.detach().double(), x.detach().double(), dy.double()
    delta = SCALE * b @ a
    close(y, seen @ served.t() + rows @ delta.t())
    close(x.grad, dy @ (served + delta))
    close(low_rank.b.grad, SCALE * dy.t() @ (rows @ a.t()))
    close(low_rank.a.grad, SCALE * (dy @ b).t() @ rows)
    assert weight.grad is None


def test_the_term_is_rounded_and_then_added_before_the_product_is():
    """Twice rounded, a term below half the last place of the product would never move it."""
    x, weight = operands()
    low_rank = dataclasses.replace(adapter(), scale=2.0**-9)
    h = (x.double() @ low_rank.a.double().t()).bfloat16()
    term = (2.0**-9 * (h.double() @ low_rank.b.double().t())).bfloat16().double()
    whole = x.double() @ weight.double().t()
    found = ops.linear(x, weight, 1, ops.low_rank_of(x, low_rank))
    assert (found != (whole + term).bfloat16()).float().mean() < 1e-2  # sums in FP32, next to a rounding boundary
    assert (found != (whole.bfloat16().double() + term).bfloat16()).float().mean() > 0.1


def test_rows_of_b_stand_where_their_matrices_are_in_the_product_and_others_have_none():
    """q and v of a fused product in an order of heads, k without an adapter."""
    rows, part, b = torch.tensor([0, 1, 3, 4, 5, 7]), torch.tensor([0, 0, 1, 0, 0, 1]), randn(6, 2).requires_grad_()
    wide = Fused.of(rows, part, 8, 2, 2).wide(b)
    expected = torch.zeros(8, 2, 2, dtype=torch.bfloat16)
    expected[rows, part] = b.detach()
    assert torch.equal(wide, expected.flatten(1))
    dwide = randn(8, 4)
    wide.backward(dwide)
    assert torch.equal(b.grad, dwide.unflatten(1, (2, 2))[rows, part])


def experts_of(shared, spec, width=128):
    w13, w2 = randn(EXPERTS, 2 * width, K) / K**0.5, randn(EXPERTS, K, width) / width**0.5
    own = () if shared else (EXPERTS,)
    adapters = leaves(adapter(2, own, K, 2 * width)), leaves(adapter(1, own, width, K))
    operand = [None if spec is None else ops.weight_operand(quantize(w, spec.weight)) for w in (w13, w2)]
    return [ExpertWeights(w, o, a) for w, o, a in zip((w13, w2), operand, adapters, strict=True)]


@pytest.mark.parametrize(("rank", "scale"), ((8, 2.0), (3, 2.0), (8, 1.5)))
def test_few_rows_of_many_experts_have_the_bits_of_each_expert_alone(rank, scale, monkeypatch):
    """They are computed with the matrices of all experts side by side, where that is faster: the bits are the same."""
    counts = torch.tensor([7, 0, 20, 2, 1, 9, 0, 1])
    x, a, b = randn(40, K), randn(8, 2 * rank, K), randn(8, N, 2 * rank)
    b.unflatten(2, (2, rank))[:, torch.arange(N), 1 - part_of(N, 2)] = 0
    found = {}
    for joined in (True, False):
        for module in ("grouped", "low_rank"):
            monkeypatch.setattr(f"fp8rl.numerics.ops.{module}.one_product_is_faster", lambda *_, joined=joined: joined)
        h = grouped.grouped_linear(x, counts, a)
        found[joined] = h, ops.grouped_low_rank_term(h, counts, b, scale, 2)
    for one, other in zip(found[True], found[False], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("spec", (None, POW2), ids=("bf16", "pow2"))
@pytest.mark.parametrize("shared", (False, True), ids=("of each expert", "of all experts"))
def test_adapted_experts_are_the_products_of_each_with_their_gradients(spec, shared):
    """An expert without tokens, and one with fewer than a product takes, among them."""
    w13, w2 = experts_of(shared, spec)
    counts = torch.tensor([70, 0, 3, TOKENS - 73])
    x = randn(TOKENS, K).requires_grad_()
    out, dy = ops.experts(x, counts, w13, w2, spec, "bf16"), randn(TOKENS, K, seed=3)
    trained, parts = [x, *(t for w in (w13, w2) for t in (w.low_rank.a, w.low_rank.b))], []
    for expert, rows in enumerate(x.split(counts.tolist())):

        def product(rows, w, expert=expert):
            low_rank = w.low_rank
            if low_rank.per_expert:
                low_rank = dataclasses.replace(low_rank, a=low_rank.a[expert], b=low_rank.b[expert])
            plus = ops.low_rank_of(rows, low_rank)
            if spec is None:
                return ops.linear(rows, w.weights[expert], 1, plus)
            return ops.fp8_linear(rows, w.weights[expert], w.operand[expert], spec, "bf16", 1, plus)

        parts.append(product(ops.swiglu(product(rows, w13)), w2))
    assert torch.equal(out, torch.cat(parts))
    expected = torch.autograd.grad(torch.cat(parts), trained, dy)
    for one, other in zip(torch.autograd.grad(out, trained, dy), expected, strict=True):
        close(one, other.double())


@pytest.mark.parametrize("spec", (None, POW2), ids=("bf16", "pow2"))
@pytest.mark.parametrize("shared", (False, True), ids=("of each expert", "of all experts"))
def test_a_row_without_the_adapter_has_every_bit_of_the_experts_alone(spec, shared):
    weights, counts, x = experts_of(shared, spec), torch.tensor([70, 0, 3, TOKENS - 73]), randn(TOKENS, K)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(TOKENS) % 3 != 1

    def out(change):
        w13, w2 = (dataclasses.replace(w, low_rank=change(w.low_rank)) for w in weights)
        return ops.experts(x, counts, w13, w2, spec, "bf16").detach().view(torch.int16)

    found = out(lambda low_rank: dataclasses.replace(low_rank, rows=rows).of_rows(order))
    whole, alone = out(lambda low_rank: low_rank), out(lambda low_rank: None)
    assert torch.equal(found, torch.where(rows[order, None], whole, alone)) and not torch.equal(whole, alone)
