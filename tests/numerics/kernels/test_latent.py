"""The kernels of latent attention against float64 and their definitions, and against themselves in every bit."""

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.kernels.attention import chunks
from fp8rl.numerics.kernels.attention.latent import latent_attention, packed_latent_attention, paged_latent_attention
from fp8rl.numerics.kernels.products import linear
from fp8rl.numerics.kv import BF16_CACHE, KVFormat
from fp8rl.numerics.ops.rope import Yarn
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec
from tests.numerics.ops.test_latent import latent64
from tests.support.kernels import DEVICE, close_in_bf16, passed, random

pytestmark = pytest.mark.slow

RANK, TAIL, SCALE = 32, 16, 0.2


def inputs(batch, length, heads):
    positions = torch.arange(length, device=DEVICE).expand(batch, -1)
    return random(batch, length, heads, RANK + TAIL, seed=1), random(batch, length, RANK + TAIL, seed=2), positions


@pytest.mark.parametrize("length, heads", [(1, 1), (70, 5)])
def test_error_is_that_of_weights_and_result_in_bf16(length, heads, monkeypatch):
    monkeypatch.setattr("tests.numerics.ops.test_latent.RANK", RANK)
    q, rows, positions = inputs(2, length, heads)
    found = passed(lambda q, rows: latent_attention(q, rows, positions, RANK, SCALE), q, rows)
    exact = passed(latent64, q.double(), rows.double())
    for ours, theirs in zip(found, exact):
        close_in_bf16(ours, theirs)


@pytest.mark.parametrize("heads, lengths", [(3, [1, 70, 33]), (1, [64])], ids=("several", "one that fills a tile"))
def test_sequences_end_to_end_have_the_bits_of_padded_ones_and_so_have_their_gradients(heads, lengths):
    q, rows, positions = inputs(len(lengths), 80, heads)
    lengths = torch.tensor(lengths, device=DEVICE)
    real = torch.arange(80, device=DEVICE) < lengths[:, None]
    padded = passed(lambda q, rows: latent_attention(q, rows, positions, RANK, SCALE), q, rows, real=real)

    def packed(q, rows):
        out = q.new_zeros(*q.shape[:3], RANK)
        return out.index_put((real,), packed_latent_attention(q[real], rows[real], lengths, RANK, SCALE))

    for found, expected in zip(passed(packed, q, rows, real=real), padded):
        assert expected.any() and torch.equal(found[real], expected[real])


@pytest.mark.parametrize("programs, kv", ((528, BF16_CACHE), (1, BF16_CACHE), (1, KVFormat(True))))
def test_decode_and_chunks_over_pages_have_the_bits_of_the_whole(programs, kv, monkeypatch):
    """Beyond 300 keys and beyond a chunk of them, from scattered slots, codes or not; a program for every chunk, or one
    for all."""
    monkeypatch.setattr(chunks, "PROGRAMS", programs)
    lengths, newest = (1040, 301), 20
    slots = torch.randperm(2000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    cache = torch.full((2000, RANK + TAIL), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    table, queries, expected = torch.stack((slots[:1100], slots[1100:].repeat(2)[:1100])).int(), [], []
    for row, length in enumerate(lengths):
        q, rows, positions = inputs(1, length, 3)
        rows = kv.keys(rows)
        cache[table[row, :length].long()] = rows[0]
        q, positions = q[:, -newest:], positions[:, -newest:]
        queries.append(q[0])
        expected.append(latent_attention(q, rows, positions, RANK, SCALE)[0])
    keys, requests, cache = torch.tensor(lengths, device=DEVICE), torch.arange(2, device=DEVICE), cache.to(kv.dtype)
    for new in (newest, 1):
        q, whole = (torch.cat([x[-new:] for x in parts]) for parts in (queries, expected))
        counts = torch.full_like(keys, new)
        assert torch.equal(paged_latent_attention(q, cache, table, requests, counts, keys, RANK, SCALE), whole)


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("scale", (None, "pow2", "fp32"))
def test_products_of_heads_are_those_of_the_definition(scale, transposed):
    """Of heads whose parts of the weight cut its blocks; each token alone has the bits of the batch."""
    weight, x = random(3 * 160, 192, seed=1), random(70, 3, 80 if transposed else 192)
    quantized = None if scale is None else quantize(weight, QuantSpec.preset(f"fp8_block_{scale}").weight)
    operand = None if quantized is None else linear.weight_operand(quantized)
    plain = None if quantized is None else quantized.dequantize(torch.bfloat16)
    plus = random(70, 3, 192 if transposed else 80, seed=5) * 8
    with using("triton"):
        found = passed(lambda x, w, d: ops.head_linear(x, w, operand, 40, 80, transposed, d), x, weight, plus)
        some = ops.head_linear(x[50:53], weight, operand, 40, 80, transposed, plus[50:53])
        none = torch.full_like(plus, -0.0)
        alone, none = (ops.head_linear(x, weight, operand, 40, 80, transposed, d) for d in (None, none))
    with using("torch"):
        expected = passed(lambda x, w, d: ops.head_linear(x, w, plain, 40, 80, transposed, d), x, weight, plus)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-8 * theirs.abs().max().item())
    assert torch.equal(some, found[0][50:53])
    assert torch.equal(alone.view(torch.int16), none.view(torch.int16)) and not torch.equal(alone, found[0])


@pytest.mark.parametrize("yarn", (None, Yarn(factor=8.0, original=1024, beta_fast=32.0, beta_slow=1.0, mscale=1.0)))
def test_neighbouring_pairs_are_turned(yarn):
    x, positions = random(2, 9, 20, 80)[..., 16:], torch.randint(0, 9000, (2, 9)).to(DEVICE)
    results = []
    for implementation in ("triton", "torch"):
        with using(implementation):
            results.append(passed(lambda x: ops.rope_pairs(x, positions, 1e4, yarn), x))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-3)


def test_what_the_kernels_do_not_know_is_refused():
    q, rows, positions = inputs(1, 4, 2)
    with pytest.raises(UserError, match="found .*float32"):
        latent_attention(q.float(), rows, positions, RANK, SCALE)
    with pytest.raises(UserError, match="rows of 48, 24 of them the value"):
        latent_attention(q, rows, positions, 24, SCALE)
