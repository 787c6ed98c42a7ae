"""Ops that an engine has in one kernel, each against the kernels of its parts: no bit differs."""

from functools import partial

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.backend.dispatch import OPS
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.kernels import norm, rope
from fp8rl.numerics.kernels.products.experts import routed_experts
from fp8rl.numerics.kernels.products.pairs import gather_by_expert
from fp8rl.numerics.kernels.products.tiles import make_tiles
from fp8rl.numerics.kernels.quantize import quantize, quantize_rows
from fp8rl.numerics.ops import ExpertWeights, HeadNorms, NewSlots
from fp8rl.numerics.ops.rope import Llama3
from fp8rl.numerics.spec import QuantSpec, TensorSpec
from tests.support.kernels import DEVICE, passed, random

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
SPEC = QuantSpec.preset("fp8_block_pow2")


def same(a, b):
    """Every bit, those of NaN as well."""
    a, b = (x.clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def odd(*shape, seed=0):
    """Rows of which one is zero, one has NaN, one infinities, one the largest numbers and one the smallest."""
    x = random(*shape, seed=seed, scale=3)
    x[0], x[1, ..., 1], x[2, ..., 3] = 0, torch.nan, torch.inf
    x[3], x[4] = torch.finfo(x.dtype).max, torch.finfo(x.dtype).tiny / 4
    return x


@pytest.mark.parametrize("scale", ("pow2", "fp32"))
@pytest.mark.parametrize("hidden", (128, 200, 1024))
def test_a_norm_that_is_kept_and_quantized(hidden, scale):
    spec, weight = TensorSpec(scale=scale), random(hidden, seed=1)
    x, beside = odd(7, hidden), odd(7, hidden, seed=2).flip(0)
    alone = norm.rms_norm_forward(x, weight, 1e-6), x
    for residual, expected in ((None, alone), (beside, norm.add_rms_norm(x, beside, weight, 1e-6))):
        normed, total, rows = norm.norm_rows(x, residual, weight, 1e-6, spec)
        codes = quantize(expected[0], spec)
        assert same(normed, expected[0]) and same(total, expected[1])
        assert same(rows.data, codes.data) and same(rows.scale_inv, codes.scale_inv)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim", "rotary", "scaling"),
    [(9, 2, 128, None, None), (4, 4, 64, None, Llama3(factor=32.0, original=8192, low=1.0, high=4.0)),
     (3, 1, 96, 40, None)],
)  # fmt: skip
def test_heads_that_are_normed_rotated_and_stored(heads, key_heads, dim, rotary, scaling):
    """Queries, keys and values are views of one product, as an engine cuts it."""
    cut = odd(6, heads + 2 * key_heads, dim)
    q, k, v = cut.split((heads, key_heads, key_heads), 1)
    positions = torch.tensor([0, 1, 5, 700, 40_000, 130_000], device=DEVICE)
    norms = HeadNorms(random(dim, seed=1), random(dim, seed=2), 1e-6)
    slots = torch.tensor([3, 11, 4, 0, 7, 8], device=DEVICE)
    for each in (norms, None):
        caches = random(2, 12, key_heads, dim, seed=3)
        stored = caches.clone()
        found = rope.rope_heads(q, k, positions, 1e6, rotary, scaling, each, NewSlots(*stored, slots, v))
        alone = rope.rope_heads(q, k, positions, 1e6, rotary, scaling, each)
        parts = (q.contiguous(), k.contiguous())
        if each is not None:
            parts = [norm.rms_norm_forward(x, w, 1e-6) for x, w in zip(parts, (norms.queries, norms.keys))]
        parts = [rope.rotated(x[None], positions[None], 1e6, rotary or dim, scaling, False)[0] for x in parts]
        caches[0][slots], caches[1][slots] = parts[1], v
        assert all(same(a, b) and same(c, b) for a, b, c in zip(found, parts, alone, strict=True))
        assert same(stored, caches)
        none = rope.rope_heads(q[:0], k[:0], positions[:0], 1e6, rotary, scaling, each)
        assert [x.shape for x in none] == [(0, heads, dim), (0, key_heads, dim)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "k"), [(5, 8, 2, 384), (37, 60, 7, 200), (2, 128, 1, 1024), (150, 3, 3, 128)]
)
def test_rows_that_are_laid_out_for_their_experts(tokens, experts, top_k, k):
    generator = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).to(DEVICE)
    chosen[: tokens // 2] = chosen[0].clone()  # most of them are taken by few
    rows = quantize_rows(odd(tokens, k) if tokens > 4 else random(tokens, k), SPEC.activation)
    order, counts = ops.group_by_expert(chosen, experts)
    for height, ids in ((64, chosen.int()), (128, chosen)):
        found, row_of, token_of, tiles = gather_by_expert(rows, ids, experts, height)
        assert torch.equal(row_of.flatten()[order], torch.arange(len(order), device=DEVICE))
        assert torch.equal(token_of, order // top_k)
        assert same(found.data, rows.data[order // top_k]) and same(found.scale_inv, rows.scale_inv[order // top_k])
        expected = make_tiles(counts, len(order), height)
        for name in ("expert", "first", "rows", "starts"):
            assert torch.equal(getattr(tiles, name), getattr(expected, name)), name


@pytest.mark.slow
def test_routed_experts():
    """With rows that a norm quantized and without, against the sorted pairs op by op."""
    x, weight = random(9, 256, scale=2), random(256, seed=4)
    first, second = (random(4, *shape, seed=5) / 16 for shape in ((256, 256), (256, 128)))
    probs, chosen = ops.route(random(9, 4, seed=6, dtype=torch.float32), 2, True, ids=torch.int32)
    with using("triton"), torch.no_grad():
        w13, w2 = (ExpertWeights(each, ops.weight_operand(quantize(each, SPEC.weight))) for each in (first, second))
        normed, _, rows = norm.norm_rows(x, None, weight, 1e-6, SPEC.activation)
        expected = OPS["routed_experts"](normed, probs, chosen, w13, w2, SPEC, "bf16")
        for given in (rows, None):
            assert same(routed_experts(normed, probs, chosen, w13, w2, SPEC, "bf16", given), expected)
        assert routed_experts(x[:0], probs[:0], chosen[:0], w13, w2, SPEC, "bf16").shape == (0, 256)
        operand = ops.weight_operand(quantize(first[0], SPEC.weight))
        assert same(ops.rows_linear(rows, operand, x.dtype), ops.fp8_linear(normed, first[0], operand, SPEC))


@pytest.mark.slow
@pytest.mark.parametrize("features", (128, 96))
def test_experts_of_a_trainer_have_the_bits_of_an_engine_and_gradients_of_the_pairs_op_by_op(features):
    x, leaves = random(150, 256), [random(4, *s, seed=5) / 16 for s in ((2 * features, 256), (256, features))]
    probs, chosen = ops.route(random(150, 4, seed=6, dtype=torch.float32), 2, True)

    def run(x, probs, *weights, op=routed_experts):
        held = (ExpertWeights(w, ops.trained_operand(w.detach(), SPEC.weight)) for w in weights)
        return op(x, probs, chosen, *held, SPEC)

    with using("triton"):
        trained = passed(run, x, probs, *leaves)
        assert all(map(same, trained, passed(partial(run, op=OPS["routed_experts"]), x, probs, *leaves)))
        with torch.no_grad():
            assert same(run(x, probs, *leaves), trained[0])
        for kept in (0, 1):  # the others are frozen, as below adapters
            found = passed(lambda *given, kept=kept: run(*given, *leaves[kept:]), x, probs, *leaves[:kept])
            assert all(map(same, found, trained[: 3 + kept]))


@pytest.mark.parametrize("longest", (40, 1100), ids=("one chunk", "chunks over programs"))
def test_attention_of_one_token_each(longest):
    """Without a count of new tokens, and with one; of them a sequence without keys, as in a padded CUDA graph."""
    q, each = random(3, 4, 32), torch.arange(3, device=DEVICE)
    keys, values = random(2, 3 * longest, 2, 32, seed=1)
    table, lengths = torch.arange(3 * longest, device=DEVICE).view(3, longest).int(), torch.tensor([longest, 0, 7])
    arguments = (q, keys, values, table, each)
    with using("triton"):
        alone, counted = (ops.paged_attention(*arguments, n, lengths.to(DEVICE), 0.1) for n in (None, each * 0 + 1))
    assert same(alone, counted) and not alone[1].any() and alone[0].isfinite().all()
    lengths[1] = 1
    with using("torch"):
        alone, counted = (ops.paged_attention(*arguments, n, lengths.to(DEVICE), 0.1) for n in (None, each * 0 + 1))
    assert same(alone, counted)
