"""Defines causal attention. A query's result depends on nothing but the query and the keys that it sees.

Keys are taken in splits of 128, in order. Each split is one FP32 product. The splits of a chunk of 1,024 keys are
merged with the online softmax (Milakov and Gimelshein 2018), which starts again in every chunk. So chunks can be
computed at the same time. Then the chunks are merged in order. A split or chunk that a query does not see changes no
bit of its result, and neither does merging the first chunk. So a query has the same result at any padded length, in
any batch, in a whole prefill, in a part of one and in decode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.numerics.backend.dispatch import note, op
from fp8rl.numerics.kv import entries
from fp8rl.numerics.ops.linear import FEWEST_ROWS

KEY_SPLIT = 128
KEY_CHUNK = 1024
# The last split may be shorter, in whole multiples of this: the keys left out would have added exact zeros.
KEY_PADDING = 32


@dataclasses.dataclass(frozen=True)
class TokenTree:
    """The layout of a prefix tree (`trees`): the places of its T tokens, for B rows in lexicographic order."""

    new: Tensor
    """int64 [B], the number of tokens that each row adds to the layout, 0 or more; their sum is T."""
    lengths: Tensor
    """int64 [B], the number of all tokens of each row."""
    table: Tensor
    """int32 [B, longest], the path of each row: its token at each position. Entries after the row's length are stale.
    The dtype has 32 bits, because kernels would spill slots of 64 bits."""
    end: Tensor
    """int64 [T], for each token the place after its last descendant (`trees`)."""
    flat: Tensor
    """int64 [sum of lengths], the paths of all rows, end to end."""
    first: Tensor
    """int64 [T], the index in `flat` at which each token occurs first."""

    def to(self, device: torch.device | str) -> TokenTree:
        """Return the same tree with its tensors on `device`."""
        return TokenTree(**{name: value.to(device) for name, value in vars(self).items()})


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """Queries, the keys and values that they attend to, and the positions of both."""

    q: Tensor
    """[B, Q, heads, D]."""
    k: Tensor
    """[B, T, kv heads, D], key t at position t."""
    v: Tensor
    """[B, T, kv heads, E]."""
    positions: Tensor
    """int64 [B, Q], the positions of the queries."""
    scale: float
    lengths: Tensor | None = None
    """int64, the lengths of sequences that are end to end in a batch of one, whose queries and keys are the same
    tokens. None: each row is a sequence. The torch definitions accept only None."""
    tree: TokenTree | None = None
    """The tree of the tokens, which are queries and keys of a batch of one; `positions` are then their places in the
    tree's layout. The torch definitions accept no tree."""


@op
def attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Compute softmax(q k^T * scale) v over the keys t <= positions[b, i].

    q [B, Q, heads, D]; k [B, T, kv heads, D], key t at position t; v [B, T, kv heads, E]; positions int64 [B, Q].
    Scores, softmax and sums are in FP32. The result is rounded once to q's dtype. Returns [B, Q, heads, E].
    """
    return _Attention.apply(q, k, v, positions, scale)


@op
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    requests: Tensor,
    new: Tensor | None,
    lengths: Tensor,
    scale: float,
) -> Tensor:
    """Compute `attention` of the newest tokens of some sequences over keys in the slots of a cache, bit for bit.

    q [tokens, heads, D] holds the new tokens of every sequence, end to end; k_cache [slots, kv heads, D] and v_cache
    [slots, kv heads, E] hold their keys and values too, in q's dtype or in codes (`numerics.kv`). Key t of sequence b
    is in slot table[requests[b], t]; table int [rows, max], requests int [B]. new int [B] counts each sequence's new
    tokens, 0 or more (None: 1 each), and lengths int [B] all of its tokens: new token i of sequence b has position
    lengths[b] - new[b] + i. Returns [tokens, heads, E], zeros for tokens of no sequence or without keys.
    """
    new = torch.ones_like(lengths) if new is None else new
    out = q.new_zeros(*q.shape[:2], v_cache.shape[-1])
    for tokens, slots, positions, real in padded_sequences(table, requests, new, lengths):
        k, v = (entries(cache, slots, q.dtype) for cache in (k_cache, v_cache))
        result = attention(q[tokens], k, v, positions, scale)
        out[tokens[real]] = result[real]
    return out


@op
def packed_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Compute `attention` of sequences that are end to end, each over its own keys, bit for bit.

    q [T, heads, D]; k [T, kv heads, D], v [T, kv heads, E]; lengths int64 [B], 1 or more each, with the sum T. Returns
    [T, heads, E]. The gradients are computed from sequences of similar length, padded with zeros.
    """
    starts = lengths.cumsum(0) - lengths
    order, real = [], []
    for some in _of_similar_length(lengths, lengths):
        some_lengths = lengths[some, None]
        steps = torch.arange(int(some_lengths.max()), device=q.device)
        real.append(steps < some_lengths)
        order.append((starts[some, None] + steps)[real[-1]])
    counts, tokens = [len(indices) for indices in order], torch.cat(order)
    results = []
    for mask, *parts in zip(real, *(x[tokens].split(counts) for x in (q, k, v)), strict=True):
        rows = [part.new_zeros(*mask.shape, *part.shape[1:]).index_put((mask,), part) for part in parts]
        positions = torch.arange(mask.shape[1], device=q.device).expand(mask.shape)
        results.append(attention(rows[0], rows[1], rows[2], positions, scale)[mask])
    return torch.cat(results)[tokens.argsort()]


@op
def attention_forward(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attention` without a gradient, and what its gradient needs.

    Return the result [B, Q, heads, E]; the result again, here not rounded; and the logarithm of the sum of each row's
    weights, FP32 [B, Q, heads].
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    groups = k.shape[2]
    queries, rows = _fold_queries(q, groups), q.shape[1] * q.shape[2] // groups
    padding = max(0, FEWEST_ROWS - rows)
    queries = F.pad(queries, (0, 0, 0, padding))
    limits = F.pad(_row_positions(inputs.positions, q.shape[2] // groups, groups), (0, 0, 0, padding))
    keys, values = _fold_keys(k), _fold_keys(v)

    peak, total, out = _attend_chunk(queries, keys[:, :KEY_CHUNK], values[:, :KEY_CHUNK], 0, limits, inputs.scale)
    for start in range(KEY_CHUNK, keys.shape[1], KEY_CHUNK):
        chunk = slice(start, start + KEY_CHUNK)
        part = _attend_chunk(queries, keys[:, chunk], values[:, chunk], start, limits, inputs.scale)
        before, peak = peak, torch.maximum(peak, part[0])  # finite: every row saw key 0, in the first chunk
        rescale, share = torch.exp(before - peak), torch.exp(part[0] - peak)
        total, out = total * rescale + part[1] * share, out * rescale + part[2] * share
    result = _unfold_rows((out / total)[:, :rows], (*q.shape[:3], v.shape[3]))
    return result.to(q.dtype), result, _unfold_rows((peak + total.log())[:, :rows], (*q.shape[:3], 1))[..., 0]


@op
def attention_dq(dout: Tensor, inputs: AttentionInputs, result: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the queries, and the term that the softmax's gradient subtracts, FP32 [B, Q, heads].

    result, logsumexp: as `attention_forward` gives them.
    """
    delta = (dout.float() * result.float()).sum(-1)
    _, dscores = _weights(dout, inputs, logsumexp, delta)
    return _of_queries(dscores, inputs), delta


@op
def attention_dkv(dout: Tensor, inputs: AttentionInputs, logsumexp: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys and values from all queries. delta: as `attention_dq` gives it.

    The keys may be a consecutive part of a sequence's keys. Positions are counted from the first key of the part; a
    query that sees none of these keys has a negative position.
    """
    weights, dscores = _weights(dout, inputs, logsumexp, delta)
    return _of_keys(dscores, inputs.q, inputs.k), _of_keys(weights, dout, inputs.v)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
        out, result, logsumexp = attention_forward(AttentionInputs(q, k, v, positions, scale))
        ctx.save_for_backward(q, k, v, positions, result, logsumexp)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, positions, result, logsumexp = ctx.saved_tensors
        inputs = AttentionInputs(q, k, v, positions, ctx.scale)
        weights, dscores = _weights(grads[0], inputs, logsumexp, (grads[0].float() * result).sum(-1))
        return _of_queries(dscores, inputs), _of_keys(dscores, q, k), _of_keys(weights, grads[0], v), None, None


def _weights(dout: Tensor, inputs: AttentionInputs, logsumexp: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of softmax attention from the saved log-sum-exp, and the gradient of its scores.

    Both are FP32 [B * groups, rows, keys] (Dao et al. 2022, without tiling).
    """
    q, groups = inputs.q, inputs.k.shape[2]
    queries, keys, values = _fold_queries(q, groups), _fold_keys(inputs.k), _fold_keys(inputs.v)
    limits = _row_positions(inputs.positions, q.shape[2] // groups, groups)
    seen = torch.arange(keys.shape[1], device=q.device) <= limits
    scores = (torch.bmm(queries, keys.transpose(1, 2)) * inputs.scale).masked_fill(~seen, -torch.inf)
    weights = torch.exp(scores - _fold_queries(logsumexp[..., None], groups))
    dweights = torch.bmm(_fold_queries(dout, groups), values.transpose(1, 2))
    return weights, weights * (dweights - _fold_queries(delta[..., None], groups)) * inputs.scale


def _of_queries(dscores: Tensor, inputs: AttentionInputs) -> Tensor:
    """Return the gradient of the queries from the gradient of their scores."""
    return _unfold_rows(torch.bmm(dscores, _fold_keys(inputs.k)), inputs.q.shape).to(inputs.q.dtype)


def _of_keys(weights: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """Return rows [B, Q, heads, D], summed with weights for each key, in the shape of k or v."""
    folded = torch.bmm(weights.transpose(1, 2), _fold_queries(rows, like.shape[2]))
    batch, length, groups, dim = like.shape
    return folded[:, :length].reshape(batch, groups, length, dim).permute(0, 2, 1, 3).to(like.dtype)


def _attend_chunk(
    queries: Tensor, keys: Tensor, values: Tensor, first: int, limits: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the online softmax of folded queries over the keys of a chunk that begins at position `first`.

    Returns each row's largest score [B, rows, 1], -inf where it sees none of these keys; the sum of its weights,
    exp(score - largest) [B, rows, 1]; and the values summed with these weights [B, rows, E].
    """
    peak = queries.new_full((*queries.shape[:2], 1), -torch.inf)
    total = queries.new_zeros(*queries.shape[:2], 1)
    out = queries.new_zeros(*queries.shape[:2], values.shape[2])
    for start in range(0, keys.shape[1], KEY_SPLIT):
        stop = min(start + KEY_SPLIT, keys.shape[1])
        scores = torch.bmm(queries, keys[:, start:stop].transpose(1, 2)) * scale
        seen = torch.arange(first + start, first + stop, device=queries.device) <= limits
        scores = scores.masked_fill(~seen, -torch.inf)
        peak, before = torch.maximum(peak, scores.amax(-1, keepdim=True)), peak
        shift = peak.masked_fill(peak == -torch.inf, 0.0)  # a row that sees no key has weights of 0
        weights, rescale = torch.exp(scores - shift), torch.exp(before - shift)
        note("scores.output", scores)
        note("softmax.reduction", scores - shift)
        note("softmax.output", weights)
        padded = F.pad(weights, (0, KEY_SPLIT - weights.shape[-1]))  # so that a shorter split adds in the same order
        total = total * rescale + padded.sum(-1, keepdim=True)
        out = out * rescale + torch.bmm(weights, values[:, start:stop])
    return peak, total, out


def _fold_queries(x: Tensor, groups: int) -> Tensor:
    """[B, Q, heads, D] -> FP32 [B * groups, heads/groups * Q, D]: the query heads that share a key head are rows."""
    batch, length, heads, dim = x.shape
    return (
        x.reshape(batch, length, groups, heads // groups, dim)
        .permute(0, 2, 3, 1, 4)
        .float()
        .reshape(batch * groups, heads // groups * length, dim)
    )


def _unfold_rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    """[B * groups, heads/groups * Q, D] -> [B, Q, heads, D], which is `shape`."""
    batch, length, heads, dim = shape
    groups = x.shape[0] // batch
    return x.reshape(batch, groups, heads // groups, length, dim).permute(0, 3, 1, 2, 4).reshape(*shape)


def _fold_keys(x: Tensor) -> Tensor:
    """[B, T, groups, D] -> FP32 [B * groups, T padded to a multiple of KEY_PADDING, D]."""
    batch, length, groups, dim = x.shape
    folded = x.permute(0, 2, 1, 3).float().reshape(batch * groups, length, dim)
    return F.pad(folded, (0, 0, 0, -length % KEY_PADDING))


def _row_positions(positions: Tensor, repeats: int, groups: int) -> Tensor:
    """int64 [B, Q] -> [B * groups, repeats * Q, 1], the position of each folded row."""
    return positions.repeat(1, repeats).repeat_interleave(groups, 0).unsqueeze(-1)


def padded_sequences(
    table: Tensor, requests: Tensor, new: Tensor, lengths: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield batches of sequences of similar length, padded to one shape. Arguments: as in `paged_attention`.

    Each batch has the indices of new tokens, int64 [b, n]; the slots of all keys, int64 [b, t]; the new tokens'
    positions, int64 [b, n]; and a mask, bool [b, n], False in the padding, which repeats the last new token.
    """
    starts = new.cumsum(0) - new
    for rows in _of_similar_length(new, lengths):
        fresh, total = new[rows].long()[:, None], lengths[rows].long()[:, None]
        steps = torch.arange(int(fresh.max()), device=table.device)
        real = steps < fresh
        steps = torch.minimum(steps, fresh - 1)
        yield starts[rows].long()[:, None] + steps, _slots(table, requests[rows], total), total - fresh + steps, real


def _of_similar_length(new: Tensor, total: Tensor) -> Iterator[Tensor]:
    """Yield the indices of sequences that are padded to one shape. Their new and total lengths are within a factor of
    two.

    Sequences without new tokens or without keys are left out.
    """
    pairs = enumerate(zip(new.tolist(), total.tolist(), strict=True))
    keys = {i: (n.bit_length(), max(t, 64).bit_length()) for i, (n, t) in pairs if n and t}
    for key in sorted(set(keys.values())):
        yield torch.tensor([i for i, k in keys.items() if k == key], device=total.device)


def _slots(table: Tensor, requests: Tensor, lengths: Tensor) -> Tensor:
    """Return the slots of each sequence's keys, int64 [sequences, longest]. lengths: [sequences, 1]."""
    positions = torch.arange(int(lengths.max()), device=table.device)
    slots = table[requests, : len(positions)].long()
    # Behind a sequence's end the table is stale: repeat a slot of its own, which is finite, and which nobody sees.
    return torch.where(positions < lengths, slots, slots[:, :1])
