"""Latent attention, its products and its rotation against float64."""

from dataclasses import replace

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.ops import LowRank
from fp8rl.numerics.ops.rope import Yarn, frequencies
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec
from fp8rl.numerics.weight_cache import Frozen
from tests.numerics.ops.test_ops import gradients, one_rounding, random

WEIGHT = QuantSpec.preset("fp8_block_pow2").weight
RANK, TAIL, HEADS, SCALE = 48, 16, 3, 0.2
EVERY_WAY = pytest.mark.parametrize(("quantized", "transposed"), [(q, t) for q in (False, True) for t in (False, True)])


def latent64(q, rows):
    """Attention of whole sequences [B, T, heads, RANK + TAIL] over rows [B, T, RANK + TAIL], with values of RANK."""
    scores = torch.einsum("bqhd,btd->bhqt", q, rows) * SCALE
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhqt,btd->bqhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), rows[..., :RANK])


def test_attention_over_latent_rows():
    """And of some of the heads, which have the same bits."""
    q, rows = random(2, 70, HEADS, RANK + TAIL), random(2, 70, RANK + TAIL, seed=1)
    positions = torch.arange(70).expand(2, -1)
    found = ops.latent_attention(q, rows, positions, RANK, SCALE)
    one_rounding(found, latent64(q.double(), rows.double()))
    assert torch.equal(ops.latent_attention(q[:, :, 1:], rows, positions, RANK, SCALE), found[:, :, 1:])
    gradients(lambda q, rows: ops.latent_attention(q, rows, positions, RANK, SCALE), latent64, q, rows)


@EVERY_WAY
def test_products_of_heads(quantized, transposed):
    """Of heads whose parts of the weight cut its blocks; with its gradients, and each head alone."""
    weight = random(HEADS * 96, 64, seed=1)
    operand = ops.weight_operand(quantize(weight, WEIGHT)) if quantized else None
    held = weight if operand is None else operand
    x = random(40, HEADS, 32 if transposed else 64)

    def exact(x, weight):
        matrices = weight.unflatten(0, (HEADS, 96))[:, 60:92]
        return torch.einsum("thn,hnr->thr" if transposed else "thr,hnr->thn", x, matrices)

    found = ops.head_linear(x, weight, operand, 60, 32, transposed)
    one_rounding(found, exact(x.double(), held.double()))
    alone = ops.head_linear(x[:7, 2:], weight[192:], None if operand is None else operand[192:], 60, 32, transposed)
    assert torch.equal(alone, found[:7, 2:])
    if not quantized:
        gradients(lambda x, w: ops.head_linear(x, w, None, 60, 32, transposed), exact, x, weight)
        return
    leaves, theirs = (
        [each.requires_grad_() for each in some] for some in ((x, weight), (x.double(), operand.double()))
    )
    ops.head_linear(*leaves, operand, 60, 32, transposed).sum().backward()
    exact(*theirs).sum().backward()
    for ours, double in zip(leaves, theirs):
        one_rounding(ours.grad, double.grad)


def product_of_heads(transposed, quantized, scale=2.0):
    """A product of heads whose parts of the weight cut its blocks: its arguments behind x, x, and its adapter."""
    weight, x = random(HEADS * 96, 64, seed=1), random(40, HEADS, 32 if transposed else 64)
    operand = ops.weight_operand(quantize(weight, WEIGHT)) if quantized else None
    low_rank = LowRank(random(6, 64, seed=2) / 8, random(HEADS * 96, 6, seed=3), scale)
    return (weight, operand, 60, 32, transposed), x, low_rank


def adapted(x, held, low_rank):
    return ops.head_linear(x, *held, ops.head_term(x, low_rank, *held[2:]))


@EVERY_WAY
@pytest.mark.parametrize("scale", (2.0, 1.5))
def test_adapted_products_of_heads_and_their_gradients(quantized, transposed, scale):
    held, x, low_rank = product_of_heads(transposed, quantized, scale)
    served = (held[0] if held[1] is None else held[1]).double()
    leaves = [each.clone().requires_grad_() for each in (x, low_rank.a, low_rank.b)]
    found = adapted(leaves[0], held, replace(low_rank, a=leaves[1], b=leaves[2]))
    dy = random(*found.shape, seed=4)
    found.backward(dy)
    theirs = [each.double().requires_grad_() for each in (x, low_rank.a, low_rank.b)]
    matrices = (served + scale * theirs[2] @ theirs[1]).unflatten(0, (HEADS, 96))[:, 60:92]
    exact = torch.einsum("thn,hnr->thr" if transposed else "thr,hnr->thn", theirs[0], matrices)
    exact.backward(dy.double())
    for ours, double in zip((found, *(each.grad for each in leaves)), (exact, *(each.grad for each in theirs))):
        assert (ours.double() - double).abs().max() <= 2**-6 * double.abs().max()


@EVERY_WAY
def test_the_term_of_a_head_is_rounded_and_then_added_before_the_product_is(quantized, transposed):
    held, x, low_rank = product_of_heads(transposed, quantized, 2.0**-9)
    served = (held[0] if held[1] is None else held[1]).double().unflatten(0, (HEADS, 96))[:, 60:92]
    a, b = low_rank.a.double(), low_rank.b.double().unflatten(0, (HEADS, 96))[:, 60:92]
    if transposed:
        whole, h = torch.einsum("thn,hnr->thr", x.double(), served), torch.einsum("thn,hnk->thk", x.double(), b)
        term = (2.0**-9 * (h.bfloat16().double() @ a)).bfloat16()
    else:
        whole, h = torch.einsum("thr,hnr->thn", x.double(), served), x.double() @ a.t()
        term = torch.einsum("thk,hnk->thn", 2.0**-9 * h.bfloat16().double(), b).bfloat16()
    found = adapted(x, held, low_rank)
    assert (found != (whole + term).bfloat16()).float().mean() < 1e-2  # sums in FP32, next to a rounding boundary
    assert (found != whole.bfloat16() + term).float().mean() > 0.1


@EVERY_WAY
def test_an_adapted_head_has_its_bits_alone_in_every_batch_and_a_row_without_adapter_those_of_the_product(
    quantized, transposed
):
    """Also of a weight that is frozen, and in zeros and their signs."""
    held, x, low_rank = product_of_heads(transposed, quantized)
    x[::7], held[0][::5], held[0][1::5] = 0.0, 0.0, -0.0
    whole, plain = adapted(x, held, low_rank), ops.head_linear(x, *held)
    last = held[0][192:], None if held[1] is None else held[1][192:], *held[2:]
    assert torch.equal(adapted(x[17:24, 2:], last, replace(low_rank, b=low_rank.b[192:])), whole[17:24, 2:])
    rows = torch.arange(60) % 3 != 1
    some, bits = adapted(x, held, replace(low_rank, rows=rows)), torch.int16
    expected = torch.where(rows[:40, None, None], whole.view(bits), plain.view(bits))
    assert torch.equal(some.view(bits), expected) and not torch.equal(whole, plain)
    if quantized:
        frozen = held[0], Frozen(quantize(held[0], WEIGHT)), *held[2:]
        thawed = held[0], ops.weight_operand(quantize(held[0], WEIGHT)), *held[2:]
        assert torch.equal(adapted(x, frozen, low_rank), adapted(x, thawed, low_rank))


YARN = Yarn(factor=40.0, original=4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0)


@pytest.mark.parametrize("yarn", (None, YARN), ids=("plain", "yarn"))
def test_rope_turns_neighbouring_pairs(yarn):
    x, positions = random(2, 9, HEADS, TAIL), torch.randint(0, 100_000, (2, 9))

    def exact(x):
        angles = positions[..., None, None] * frequencies(10000.0, TAIL, yarn)
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2)

    one_rounding(ops.rope_pairs(x, positions, 10000.0, yarn), exact(x.double()))
    gradients(lambda x: ops.rope_pairs(x, positions, 10000.0, yarn), exact, x)
