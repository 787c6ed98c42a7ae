"""Latent attention, its products and its rotation against float64, and whole sequences against chunks and decode."""

import pytest
import torch

from numerics import ops
from numerics.ops.rope import Yarn, frequencies
from numerics.quantize import quantize
from numerics.spec import QuantSpec
from tests.numerics.ops.test_ops import gradients, one_rounding, random

WEIGHT = QuantSpec.preset("fp8_block_pow2").weight
RANK, TAIL, HEADS, SCALE = 48, 16, 3, 0.2


def latent64(q, rows):
    """Attention of whole sequences [B, T, heads, RANK + TAIL] over rows [B, T, RANK + TAIL], with values of RANK."""
    scores = torch.einsum("bqhd,btd->bhqt", q, rows) * SCALE
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhqt,btd->bqhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), rows[..., :RANK])


def test_attention_over_latent_rows():
    q, rows = random(2, 70, HEADS, RANK + TAIL), random(2, 70, RANK + TAIL, seed=1)
    positions = torch.arange(70).expand(2, -1)
    one_rounding(ops.latent_attention(q, rows, positions, RANK, SCALE), latent64(q.double(), rows.double()))
    gradients(lambda q, rows: ops.latent_attention(q, rows, positions, RANK, SCALE), latent64, q, rows)


def test_chunks_and_decode_from_scattered_slots_have_the_bits_of_whole_sequences():
    """More than 300 keys, beside a shorter sequence; so have sequences end to end, and some of the heads."""
    lengths = [330, 131]
    q, rows = (random(2, 330, *shape, seed=seed) for seed, shape in enumerate([(HEADS, RANK + TAIL), (RANK + TAIL,)]))
    whole = ops.latent_attention(q, rows, torch.arange(330).expand(2, -1), RANK, SCALE)
    packed = [torch.cat([x[0], x[1, :131]]) for x in (q, rows, whole)]
    assert torch.equal(ops.packed_latent_attention(*packed[:2], torch.tensor(lengths), RANK, SCALE), packed[2])
    some = ops.latent_attention(q[:, :, 1:], rows, torch.arange(330).expand(2, -1), RANK, SCALE)
    assert torch.equal(some, whole[:, :, 1:])

    slots = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:660].view(2, 330)
    cache = torch.full((1000, RANK + TAIL), torch.nan).bfloat16()
    cache[slots] = rows
    done = [0, 0]
    for new in ([96, 131], [200, 0], [33, 0], [1, 0]):
        stops = [start + count for start, count in zip(done, new)]
        queries, expected = (torch.cat([x[i, a:b] for i, (a, b) in enumerate(zip(done, stops))]) for x in (q, whole))
        where = (slots.int(), torch.arange(2), torch.tensor(new), torch.tensor(stops))
        assert torch.equal(ops.paged_latent_attention(queries, cache, *where, RANK, SCALE), expected)
        done = stops
    assert done == lengths


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("quantized", (False, True))
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
    leaves = [each.clone().requires_grad_() for each in (x, weight)]
    ops.head_linear(*leaves[:1], leaves[1], operand, 60, 32, transposed).sum().backward()
    theirs = [x.double().requires_grad_(), operand.double().requires_grad_()]
    exact(*theirs).sum().backward()
    for ours, double in zip(leaves, theirs):
        one_rounding(ours.grad, double.grad)


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
