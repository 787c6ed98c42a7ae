"""The kernels of attention over prefix trees against those of rows that share nothing, bit for bit, and against
float64."""

import dataclasses
import random as python_random

import pytest
import torch

from fp8rl.numerics.kernels.attention.forward import packed_attention
from fp8rl.numerics.kernels.attention.latent import packed_latent_attention, tree_latent_attention
from fp8rl.numerics.kernels.trees import tree_attention
from tests.numerics.ops.test_attention import tree_of
from tests.support.kernels import DEVICE, close_in_bf16, random
from tests.support.trees import branching_rows

SCALE, RANK, TAIL = 0.1, 32, 16


def keys_and_values(tree, *leaves):
    return tree_attention(*leaves, tree, SCALE)


def of_rows(lengths, *leaves):
    return packed_attention(*leaves, lengths, SCALE)


def latents(tree, *leaves):
    return tree_latent_attention(*leaves, tree, RANK, SCALE)


def latents_of_rows(lengths, *leaves):
    return packed_latent_attention(*leaves, lengths, RANK, SCALE)


HEADS = (keys_and_values, of_rows, ((4, 16), (2, 16), (2, 16)))
LATENT = (latents, latents_of_rows, ((2, RANK + TAIL), (RANK + TAIL,)))
BOTH = pytest.mark.parametrize("op, flat_op, shapes", (HEADS, LATENT), ids=("heads", "latent"))


def inputs(shapes, tokens):
    return [random(tokens, *shape, seed=seed) for seed, shape in enumerate(shapes, 1)]


def passed(op, dout, *leaves):
    """The result and the gradients of the leaves; dout: of the result, which it may be wider than."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = op(*leaves)
    out.backward(dout[..., : out.shape[-1]].to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves)]


def branching(*longest, seed=0):
    """Rows whose stretches are up to so long, by depth, of which some end within others. One is there twice."""
    rows = branching_rows(python_random.Random(seed), [(1, most) for most in longest], branches=2)
    return [*rows, rows[0]]


def tree_here(rows):
    """The tree of rows, whose table points behind its rows' ends to where nothing is; and their paths."""
    tree, paths = tree_of(rows)
    behind = torch.arange(tree.table.shape[1]) >= tree.lengths[:, None]
    return dataclasses.replace(tree, table=tree.table.masked_fill(behind, 10**9)).to(DEVICE), paths


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("longest", ((40,), (40, 40), (40, 20, 20), (30, 8, 8, 8)), ids=len)
def test_results_have_the_bits_of_rows_that_share_nothing_and_so_have_gradients_of_queries(
    longest, op, flat_op, shapes
):
    """Gradients of keys and values are those of all rows together, of which each is rounded there and none here."""
    compare_with_rows(branching(*longest), op, flat_op, shapes)


@pytest.mark.slow
def test_rows_that_part_around_a_split_of_keys():
    compare_with_rows([[*range(n), 1000, 1000] for n in (127, 128, 129)], *HEADS)


@pytest.mark.slow
def test_rows_that_part_behind_a_chunk_of_keys():
    tree, _ = tree_here([[*range(1030), end, end] for end in (1, 2)])
    leaves = inputs(((1, 16),) * 3, len(tree.end))
    found = keys_and_values(tree, *leaves)
    assert torch.equal(found[tree.flat], of_rows(tree.lengths, *(x[tree.flat] for x in leaves)))


def compare_with_rows(rows, op, flat_op, shapes):
    tree, _ = tree_here(rows)
    leaves = inputs(shapes, len(tree.end))
    dout = random(*leaves[0].shape, seed=9)
    in_rows = torch.zeros(len(tree.flat), *dout.shape[1:], device=DEVICE).index_copy(0, tree.first, dout.float())
    found = passed(lambda *x: op(tree, *x), dout, *leaves)
    flat = passed(lambda *x: flat_op(tree.lengths, *x), in_rows, *(x[tree.flat] for x in leaves))
    assert torch.equal(found[0][tree.flat], flat[0]) and flat[1].any() and torch.equal(found[1], flat[1][tree.first])
    for gradient, of_copies in zip(found[2:], flat[2:], strict=True):
        together = torch.zeros(gradient.shape, dtype=torch.float64, device=DEVICE)
        close_in_bf16(gradient, together.index_add(0, tree.flat, of_copies.double()))


def attention64(paths, q, k, v):
    """Attention of each token over its path."""
    seen = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device)
    for path in paths:
        for i, token in enumerate(path):
            seen[token, path[: i + 1]] = True
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,thd->hqt", q, k) * SCALE
    return torch.einsum("hqt,thd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.slow
@BOTH
def test_results_and_gradients_are_those_of_float64(op, flat_op, shapes):
    tree, paths = tree_here(branching(40, 20, 20, seed=1))
    leaves = inputs(shapes, len(tree.end))
    dout = random(*leaves[0].shape, seed=9)

    def exact(q, k, v=None):
        return attention64(paths, q, *((k[:, None], k[:, None, :RANK]) if v is None else (k, v)))

    found = passed(lambda *x: op(tree, *x), dout, *leaves)
    for ours, theirs in zip(found, passed(exact, dout, *(x.double() for x in leaves)), strict=True):
        close_in_bf16(ours, theirs)


@pytest.mark.slow
@BOTH
def test_a_row_of_padding_changes_no_bit_of_the_others_and_two_runs_are_equal(op, flat_op, shapes):
    rows, padding = branching(30, 20, 20, seed=2), 70
    (tree, _), (padded, _) = tree_here(rows), tree_here([*rows, [65_535] * padding])
    assert padded.new[-1] == padded.lengths[-1] == padding
    leaves = inputs(shapes, len(padded.end))
    dout = random(*leaves[0].shape, seed=9)
    dout[-padding:] = 0
    found, again = (passed(lambda *x: op(padded, *x), dout, *leaves) for _ in range(2))
    alone = passed(lambda *x: op(tree, *x), dout[:-padding], *(x[:-padding] for x in leaves))
    for one, two, own in zip(found, again, alone, strict=True):
        assert torch.equal(one, two) and own.any() and torch.equal(one[:-padding], own)
    assert not any(gradient[-padding:].any() for gradient in found[1:])
