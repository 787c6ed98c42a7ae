"""The attention kernels against float64 and against the torch op; prefill, chunks, decode and pages bit for bit."""

from importlib import import_module

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.kernels.attention import chunks as attention_chunks
from fp8rl.numerics.kernels.attention import forward as attention_forward_kernel
from fp8rl.numerics.kernels.attention.backward import attention_dkv, attention_dq
from fp8rl.numerics.kernels.attention.forward import attention, attention_forward, packed_attention
from fp8rl.numerics.kv import BF16_CACHE, CODES, KVFormat
from tests.support.kernels import DEVICE, close_in_bf16, passed, random

SCALE = 0.1


def inputs(batch, queries, keys, heads, key_heads, dim):
    q = random(batch, queries, heads, dim, seed=1)
    k, v = (random(batch, keys, key_heads, dim, seed=seed) for seed in (2, 3))
    return q, k, v, torch.arange(keys - queries, keys, device=DEVICE).expand(batch, -1)


def attention64(q, k, v, positions):
    """Attention, and the same weights over |v|."""
    repeats = q.shape[2] // k.shape[2]
    q, k, v = q.double(), k.double().repeat_interleave(repeats, 2), v.double().repeat_interleave(repeats, 2)
    unseen = torch.arange(k.shape[1], device=q.device) > positions[:, None, :, None]
    scores = torch.einsum("bqhd,bthd->bhqt", q, k) * SCALE
    weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    return tuple(torch.einsum("bhqt,bthd->bqhd", weights, x) for x in (v, v.abs()))


# Query tokens, keys, heads, key heads, head size. Rows of a tile: 128.
SHAPES = [
    (1, 1, 1, 1, 64), (9, 9, 3, 3, 16), (40, 129, 8, 2, 32), (20, 330, 8, 1, 128), (270, 270, 1, 1, 16),
    (20, 150, 3, 1, 256), (33, 1100, 4, 1, 16),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors_are_those_of_weights_result_and_gradients_in_bf16(shape):
    q, k, v, positions = inputs(2, *shape)
    exact, size = attention64(q, k, v, positions)
    found = attention(q, k, v, positions, SCALE).double()
    assert ((found - exact).abs() <= bound(exact, size)).all()
    # The definition does not round its weights, but its result.
    definition = ops.attention(q, k, v, positions, SCALE).double()
    assert ((found - definition).abs() <= bound(exact, size) + bound(exact, 0)).all()
    compare_gradients(q, k, v, positions)


def bound(exact, size):
    """BF16 rounds by up to 2^-8: each weight, and the result. FP32 before that."""
    return 2**-8 * (size + 1.01 * exact.abs()) + 1e-5


def test_weights_are_rounded_to_bf16_as_the_precision_map_plans():
    """Two keys, of which one has a value: what leaves is its weight over the sum of both, which is not rounded."""
    q = random(1, 64, 1, 16, seed=1)
    k, v = random(1, 2, 1, 16, seed=2), torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16, device=DEVICE)
    v[:, 1] = 1.0
    positions = torch.ones(1, 64, dtype=torch.int64, device=DEVICE)
    scores = (q[0, :, 0].double() @ k[0, :, 0].double().t()) * SCALE
    weights = torch.exp(scores - scores.amax(1, keepdim=True))
    rounded = (weights[:, 1].bfloat16().double() / weights.sum(1)).bfloat16()
    found = attention(q, k, v, positions, SCALE)[0, :, 0, 0]
    definition = ops.attention(q, k, v, positions, SCALE)[0, :, 0, 0]
    assert (found == rounded).double().mean() > 0.95 and (definition == rounded).double().mean() < 0.9


@pytest.mark.slow
def test_keys_in_parts_get_the_gradients_that_they_get_together():
    """As ranks that share a row take them: all queries, and some keys next to each other."""
    q, k, v, positions = inputs(2, 150, 150, 4, 2, 16)
    dout = random(*q.shape, seed=4)
    whole = ops.AttentionInputs(q, k, v, positions, SCALE)
    _, result, logsumexp = attention_forward(whole)
    dq, delta = attention_dq(dout, whole, result, logsumexp)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    attention(*leaves, positions, SCALE).backward(dout)
    assert torch.equal(dq, leaves[0].grad)
    first = 0
    for some in zip(k.split((50, 70, 30), 1), v.split((50, 70, 30), 1)):
        own = slice(first, first + some[0].shape[1])
        found = attention_dkv(dout, ops.AttentionInputs(q, *some, positions - first, SCALE), logsumexp, delta)
        for gradient, leaf in zip(found, leaves[1:]):
            assert torch.equal(gradient, leaf.grad[:, own])
        first = own.stop


def compare_gradients(q, k, v, positions):
    _, *found = passed(lambda *x: attention(*x, positions, SCALE), q, k, v)
    _, *exact = passed(lambda *x: attention64(*x, positions)[0], q.double(), k.double(), v.double())
    for ours, theirs in zip(found, exact):
        close_in_bf16(ours, theirs)


@pytest.mark.slow
def test_strided_inputs_are_read_in_place():
    """As in the trainer: [T, B, ...] transposed, k and v parts of one product."""
    packed = random(70, 2, 4, 64, seed=5)
    q, k, v = (x.transpose(0, 1) for x in packed.split((2, 1, 1), 2))
    positions = torch.arange(70, device=DEVICE).expand(2, -1)
    expected = attention(q.contiguous(), k.contiguous(), v.contiguous(), positions, SCALE)
    assert torch.equal(attention(q, k, v, positions, SCALE), expected)
    compare_gradients(q, k, v, positions)


@pytest.mark.slow
@pytest.mark.parametrize(
    "heads, key_heads, dim, lengths",
    [
        (4, 1, 16, [1, 70, 130, 33]),
        (2, 2, 64, [1, 70, 130, 33]),
        (1, 1, 16, [150, 130]),  # more than a chunk of keys together, and less each
        (1, 1, 16, [260, 70]),
        (1, 1, 16, [128]),  # fills a tile, of the two that so many rows could need
    ],
)
def test_sequences_end_to_end_have_the_bits_of_padded_ones_and_so_have_their_gradients(
    heads, key_heads, dim, lengths, short_chunks
):
    width = max(lengths) + 10
    real = torch.arange(width, device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]
    q, k, v, positions = inputs(len(lengths), width, width, heads, key_heads, dim)
    own = torch.tensor(lengths, device=DEVICE)

    def packed(*padded):
        return torch.zeros_like(q).index_put((real,), packed_attention(*(x[real] for x in padded), own, SCALE))

    expected = passed(lambda *x: attention(*x, positions, SCALE), q, k, v, real=real)
    for ours, theirs in zip(passed(packed, q, k, v, real=real), expected):
        assert theirs[real].any() and torch.equal(ours[real], theirs[real])


class Sequences:
    """Sequences of these lengths, all over the slots of one cache; NaN in its other slots, and a table that points
    anywhere behind a sequence's end. expected [length, heads, D]: attention over each whole sequence, of its `newest`
    tokens."""

    def __init__(self, lengths, heads=8, key_heads=2, dim=64, newest=10000, kv=BF16_CACHE):
        generator = torch.Generator().manual_seed(0)
        self.lengths, self.kv = lengths, kv
        slots = torch.randperm(2 * sum(lengths), generator=generator).to(DEVICE)
        self.k_cache = torch.full((len(slots), key_heads, dim), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        self.v_cache = self.k_cache.clone()
        self.table = torch.randint(0, len(slots), (len(lengths) + 3, max(lengths) + 5), generator=generator).to(DEVICE)
        self.table = self.table.int()
        self.requests = torch.randperm(len(lengths) + 3, generator=generator)[: len(lengths)].to(DEVICE)
        self.queries, self.expected, used = [], [], 0
        for i, length in enumerate(lengths):
            q = random(1, length, heads, dim, seed=10 + i)
            k, v = (random(1, length, key_heads, dim, seed=seed + i) for seed in (30, 50))
            k, v = kv.keys(k), kv.values(v)
            own = slots[used : used + length]
            used += length
            self.table[self.requests[i], :length] = own.int()
            self.k_cache[own], self.v_cache[own] = k[0], v[0]
            self.queries.append(q[0])
            expected, positions = torch.full_like(q[0], torch.nan), torch.arange(length, device=DEVICE)[None, -newest:]
            expected[-newest:] = ops.attention(q[:, -newest:], k, v, positions, SCALE * kv.key_scale)[0]
            self.expected.append(kv.result(expected))
        self.k_cache, self.v_cache = self.k_cache.to(kv.dtype), self.v_cache.to(kv.dtype)

    def tokens(self, starts, stops):
        """Queries of tokens starts[i] to stops[i] of each sequence, and what attention of these should be."""
        both = self.queries, self.expected
        return [torch.cat([x[a:b] for x, a, b in zip(each, starts, stops)]) for each in both]

    def run(self, starts, stops):
        """Attention of these tokens over the pages, and what it should be."""
        q, expected = self.tokens(starts, stops)
        new, keys = (torch.tensor(x, device=DEVICE) for x in ([b - a for a, b in zip(starts, stops)], stops))
        out = ops.paged_attention(q, self.k_cache, self.v_cache, self.table, self.requests, new.int(), keys, SCALE)
        return out, expected


LENGTHS = [1, 300, 127, 129]


@pytest.mark.slow
@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize("heads, key_heads, dim", [(1, 1, 128), (4, 1, 64), (8, 1, 128)])
def test_decode_and_chunks_over_pages_have_the_bits_of_the_whole(heads, key_heads, dim):
    sequences = Sequences(LENGTHS, heads, key_heads, dim)
    done = [0] * len(LENGTHS)
    for chunk in (50, 1, 400):  # the middle round is a decode step
        stops = [min(start + chunk, length) for start, length in zip(done, LENGTHS)]  # none new where complete
        out, expected = sequences.run(done, stops)
        assert torch.equal(out, expected)
        done = stops
    out, expected = sequences.run([length - 1 for length in LENGTHS], LENGTHS)
    assert torch.equal(out, expected)


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of 256 keys, so that few keys are several."""
    for module in (attention_forward_kernel, attention_chunks, import_module("fp8rl.numerics.ops.attention")):
        monkeypatch.setattr(module, "KEY_CHUNK", 256)


@pytest.mark.slow
@pytest.mark.usefixtures("each_implementation", "short_chunks")
def test_chunks_of_keys_have_the_bits_of_the_whole_in_any_number_of_programs(monkeypatch):
    """A program for every chunk, one that leaves the parts of all, and one that merges them itself."""
    lengths = [530, 256, 3, 257]
    sequences = Sequences(lengths, 5, 1, 16, newest=30)
    for name, value in (("PROGRAMS", 528), ("PROGRAMS", 1), ("PART_BYTES", 0)):
        monkeypatch.setattr(attention_chunks, name, value)
        for new in (1, 30):
            out, expected = sequences.run([max(0, length - new) for length in lengths], lengths)
            assert torch.equal(out, expected)


@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize("length", (40, 1030), ids=("one chunk", "chunks of keys"))
def test_sequences_and_tokens_that_only_fill_up_a_batch(length):
    """A CUDA graph's batch has one size: sequences without keys, tokens behind the last sequence's."""
    sequences = Sequences([length, 3], newest=1)
    q = torch.cat((sequences.queries[0][-1:], random(2, 8, 64, seed=7)))
    new, keys = torch.tensor([1, 1], device=DEVICE), torch.tensor([length, 0], device=DEVICE)
    caches = sequences.k_cache, sequences.v_cache, sequences.table, sequences.requests
    out = ops.paged_attention(q, *caches, new, keys, SCALE)
    assert torch.equal(out[0], sequences.expected[0][-1]) and not out[1:].any()


@pytest.mark.usefixtures("each_implementation")
def test_a_cache_of_codes_has_the_bits_of_the_numbers_that_they_are():
    sequences = Sequences([140, 3], newest=30, kv=KVFormat(True))
    for new in (30, 1):
        out, expected = sequences.run([max(0, length - new) for length in (140, 3)], (140, 3))
        assert torch.equal(out, expected)


def test_what_the_kernels_do_not_know_is_refused():
    q, k, v, positions = inputs(1, 4, 4, 2, 1, 64)
    for refused, said in (
        ((q.float(), k, v), "found .*float32"),
        ((q, k.to(CODES), v.to(CODES)), "found .*float8_e4m3fn.*, expected BF16 q, k and v. Cast"),
        ((x[..., :48] for x in (q, k, v)), "head size: found 48"),
        ((q[:, :, :1], k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)), "kv heads that divide"),
    ):
        with pytest.raises(UserError, match=said):
            attention(*refused, positions, SCALE)
