"""Attention: rows end to end, in chunks and over prefix trees, against padded rows and float64."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.ops.attention import KEY_CHUNK, KEY_SPLIT
from fp8rl.trainer.step.trees import build_tree
from tests.support.trees import branching_rows


def test_sequences_end_to_end_have_the_bits_of_padded_ones():
    """The gradient of keys is added up over as many queries as there are; padding cuts this sum at other places, which
    turns a last bit of BF16 here and there."""
    torch.manual_seed(0)
    lengths = torch.tensor([5, 140, 1, 33, 64, 129])
    real = torch.arange(150) < lengths[:, None]
    q, dout = torch.randn(2, *real.shape, 4, 32).bfloat16() * real[..., None, None]
    k, v = torch.randn(2, *real.shape, 2, 32).bfloat16() * real[..., None, None]

    def passed(dtype, dout, op, *leaves):
        leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]
        out = op(*leaves)
        out.backward(dout.to(dtype))
        return [out.detach(), *(x.grad for x in leaves)]

    positions = torch.arange(150).expand(real.shape)
    for dtype, bound in ((torch.bfloat16, 1e-3), (torch.float32, 1e-6)):
        padded = passed(dtype, dout, lambda *x: ops.attention(*x, positions, 0.1), q, k, v)
        parts = [x[real] for x in (q, k, v)]
        packed = passed(dtype, dout[real], lambda *x: ops.packed_attention(*x, lengths, 0.1), *parts)
        assert torch.equal(packed[0], padded[0][real])
        for found, expected in zip(packed[1:], padded[1:]):
            assert (found - expected[real]).norm() <= bound * expected.norm()


def softmax_over_splits(q, k, v, scale):
    """The online softmax of one head's queries [Q, D], all of which see all keys [T, D]; whole splits."""
    peak, total, out = torch.full((len(q), 1), -torch.inf), torch.zeros(len(q), 1), torch.zeros_like(q)
    for keys, values in zip(k.split(KEY_SPLIT), v.split(KEY_SPLIT)):
        scores = torch.mm(q, keys.t()) * scale
        new_peak = torch.maximum(peak, scores.amax(1, keepdim=True))
        weights, rescale = torch.exp(scores - new_peak), torch.exp(peak - new_peak)
        total = total * rescale + weights.sum(1, keepdim=True)
        out, peak = out * rescale + torch.mm(weights, values), new_peak
    return peak, total, out


def test_chunks_are_softmaxes_of_their_own_merged_in_order():
    torch.manual_seed(0)
    q, k, v = torch.randn(64, 32), torch.randn(2 * KEY_CHUNK, 32), torch.randn(2 * KEY_CHUNK, 32)
    both = [softmax_over_splits(q, *parts, 0.3) for parts in zip(k.split(KEY_CHUNK), v.split(KEY_CHUNK))]
    peak = torch.maximum(both[0][0], both[1][0])
    shares = [torch.exp(each[0] - peak) for each in both]
    total, out = (both[0][i] * shares[0] + both[1][i] * shares[1] for i in (1, 2))

    def attended(keys):
        """With queries that see fewer keys beside them."""
        positions = torch.cat((torch.full((64,), keys - 1), torch.arange(64)))[None]
        queries = torch.cat((q, q))[None, :, None]
        return ops.attention(queries, k[None, :, None], v[None, :, None], positions, 0.3)[0, :64, 0]

    assert torch.equal(attended(2 * KEY_CHUNK), out / total)
    assert torch.equal(attended(KEY_CHUNK), both[0][2] / both[0][1])  # merging the first chunk changes nothing


SPANS = {
    "one row": [(150, 150)], "branches": [(3, 40), (1, 30), (1, 20)],
    "at a split's border": [(126, 130), (1, 5), (120, 130)], "beyond a chunk": [(1000, 1030), (1, 60)],
}  # fmt: skip


def tree_of(rows: list[list[int]]):
    lengths = [len(row) for row in rows]
    keys = np.full((len(rows), max(lengths), 1), -1)
    for index, row in enumerate(rows):
        keys[index, : len(row), 0] = row
    tree, _, place = build_tree(keys, lengths)
    return tree, [place[index, :length] for index, length in enumerate(lengths)]


def float64_gradients(q: Tensor, k: Tensor, v: Tensor, scale: float, dout: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    shared = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(shared, 1)) * scale
    scores = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(shared, 1))
    return torch.autograd.grad(out, (q, k, v), dout.double())


@pytest.mark.slow
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_every_row_has_its_own_bits_and_gradients_are_the_sums_of_rows(spans: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    tree, paths = tree_of(branching_rows(random.Random(3), spans))
    tokens = int(tree.new.sum())
    q, k, v = (torch.randn(tokens, heads, 32).bfloat16().requires_grad_() for heads in (4, 2, 2))
    out = ops.tree_attention(q, k, v, tree, 0.2)
    whole = torch.zeros(tokens, 4, 32, dtype=torch.float64)
    wanted = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)]
    for path in paths:
        one = [x.detach()[path] for x in (q, k, v)]
        alone = ops.attention(*(x[None] for x in one), torch.arange(len(path))[None], 0.2)[0]
        assert torch.equal(out[path], alone)
        dout = torch.randint(-4, 5, alone.shape).double() / 8  # whose sums over rows are exact in BF16
        whole.index_add_(0, path, dout)
        for total, found in zip(wanted, float64_gradients(*one, 0.2, dout), strict=True):
            total.index_add_(0, path, found)
    assert torch.equal(whole, whole.bfloat16().double())
    for found, expected in zip(torch.autograd.grad(out, (q, k, v), whole.bfloat16()), wanted, strict=True):
        assert (found.double() - expected).norm() <= 3e-3 * expected.norm()  # of one rounding to BF16


@pytest.mark.parametrize("seed", range(20))
def test_a_key_is_on_the_paths_of_an_interval_of_tokens(seed: int) -> None:
    """Against sets of ancestors, of rows of two or three different numbers."""
    rng = random.Random(seed)
    rows = [
        [0] * 3 + [rng.randrange(2 + seed % 2) for _ in range(rng.randint(0, 12))] for _ in range(rng.randint(1, 9))
    ]
    tree, paths = tree_of(rows)
    tokens = int(tree.new.sum())
    assert tokens == len({tuple(row[: at + 1]) for row in rows for at in range(len(row))})
    on_path = torch.zeros(tokens, tokens, dtype=torch.bool)
    for path in paths:
        for at, token in enumerate(path.tolist()):
            on_path[path[: at + 1], token] = True
    query = torch.arange(tokens)
    assert torch.equal(on_path, (query[:, None] <= query) & (query < tree.end[:, None]))
    assert torch.equal(tree.flat[tree.first], query)
    flat = [tree.table[row, :length] for row, length in enumerate(tree.lengths.tolist())]
    assert torch.equal(torch.cat(flat), tree.flat)


def test_a_shared_row_s_gradient_is_rounded_once() -> None:
    """257 = 256 + 1 is 256 or 258 in BF16: added one by one in BF16, the ones would be lost."""
    x = torch.zeros(3, 1, dtype=torch.bfloat16, requires_grad=True)
    out = ops.gathered(x, torch.tensor([[2, 2, 2], [0, 2, 2]]))
    out.backward(torch.tensor([256.0, 1, 1, 5, 1, 1]).view(2, 3, 1).bfloat16())
    assert x.grad is not None and x.grad.flatten().tolist() == [5, 0, 260]
