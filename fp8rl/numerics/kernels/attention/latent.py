"""Computes attention over latent rows on the tensor core (`numerics.ops.latent`): contiguous, packed, trees and paged.

It is the kernel of `forward` with tiles of 64 rows. A key is a row of D + TAIL channels, and its first D channels are
also its value, so a program reads each row once for both. All query heads share the rows. So a tile with up to 64 heads
of a decoded token reads the sequence's rows once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.kernels.arithmetic import cast, dense_rows, dot
from fp8rl.numerics.kernels.attention.backward import (
    LOG2_E,
    Places,
    first_query_at,
    packed_constant,
    places_of_keys,
    places_of_queries,
    stages_of,
    tiles_of,
)
from fp8rl.numerics.kernels.attention.chunks import find_sequence, key_slots, positions_of
from fp8rl.numerics.kernels.attention.forward import attend, attend_paged, check_dtypes
from fp8rl.numerics.kv import CODES
from fp8rl.numerics.ops.attention import AttentionInputs, TokenTree


def latent_attention(q: Tensor, rows: Tensor, positions: Tensor, rank: int, scale: float) -> Tensor:
    """Compute `numerics.ops.latent_attention`. Raises UserError for a dtype other than BF16, or if the rank or the
    width of the rotated part is no power of two."""
    _check(q, rows, rank)
    return _Latent.apply(dense_rows(q), dense_rows(rows), positions, rank, scale)


def packed_latent_attention(q: Tensor, rows: Tensor, lengths: Tensor, rank: int, scale: float) -> Tensor:
    _check(q, rows, rank)
    positions = positions_of(lengths, len(q))[None]
    return _Latent.apply(dense_rows(q)[None], dense_rows(rows)[None], positions, rank, scale, lengths.contiguous())[0]


def tree_latent_attention(q: Tensor, rows: Tensor, tree: TokenTree, rank: int, scale: float) -> Tensor:
    """`numerics.ops.tree_latent_attention`, as `trees.tree_attention`."""
    _check(q, rows, rank)
    inputs = dense_rows(q)[None], dense_rows(rows)[None], torch.arange(len(q), device=q.device)[None]
    return _Latent.apply(*inputs, rank, scale, None, tree)[0]


def paged_latent_attention(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    requests: Tensor,
    new: Tensor | None,
    lengths: Tensor,
    rank: int,
    scale: float,
) -> Tensor:
    """`numerics.ops.paged_latent_attention`, without a wait for the device (`forward.paged_attention`)."""
    _check(q, cache, rank, CODES)
    keys = cache.unsqueeze(1)
    return attend_paged(q, keys, keys[..., :rank], table, requests, new, lengths, scale, cache.shape[-1] - rank)


class _Latent(torch.autograd.Function):
    """`latent_attention`; the rest as `forward.Attention`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        rows: Tensor,
        positions: Tensor,
        rank: int,
        scale: float,
        lengths: Tensor | None = None,
        tree: TokenTree | None = None,
    ) -> Tensor:
        keys = rows.unsqueeze(2)
        inputs = AttentionInputs(q, keys, keys[..., :rank], positions, scale, lengths, tree)
        out, logsumexp = attend(inputs, rows.shape[-1] - rank)
        ctx.save_for_backward(q, rows, positions, lengths, out, logsumexp)
        ctx.scale, ctx.rank, ctx.tree = scale, rank, tree
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, rows, positions, lengths, out, logsumexp = ctx.saved_tensors
        inputs = AttentionInputs(q, rows, rows[..., : ctx.rank], positions, ctx.scale, lengths, ctx.tree)
        return *_gradients(grads[0], inputs, out, logsumexp), None, None, None, None, None


def _check(q: Tensor, rows: Tensor, rank: int, kept: torch.dtype = torch.bfloat16) -> None:
    """Raise UserError unless the kernels know these dtypes and sizes. kept: see `check_dtypes`."""
    check_dtypes(q, rows, kept=kept)
    tail = rows.shape[-1] - rank
    known = 16 <= rank <= 512 and 16 <= tail <= 128 and not rank & (rank - 1) and not tail & (tail - 1)
    if not known or q.shape[-1] != rows.shape[-1]:
        found = f"queries of {q.shape[-1]} channels, rows of {rows.shape[-1]}, {rank} of them the value"
        expected = "queries as wide as rows, a value of 16 to 512 channels, and 16 to 128 more, both powers of two"
        raise user_error("latent attention", found, expected, "Run the ops on torch.")


# The gradient of attention over latent rows (`latent`), by two kernels, without atomics.
#
# They are the kernels of `backward`, made for keys of D + TAIL channels that are their own values, so that one gradient
# holds both parts. A thread's registers hold the sums of all channels and little else. Therefore a query and the
# gradient of its result, which meet the same keys, are neighbours in one tile of twice the rows: one product gives
# scores and the gradients of weights, and in the kernel of the rows one more adds both parts of their gradient.
#
# Sums FP32; weights and score gradients are rounded to BF16 for their products.

_HELD, _TAKEN = 64, 16  # queries or keys that a program holds, and takes at a time


def _gradients(dout: Tensor, inputs: AttentionInputs, result: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of q BF16 [B, Q, heads, D + TAIL] and of rows k BF16 [B, T, D + TAIL].

    dout, result BF16 [B, Q, heads, D]. logsumexp: as in `backward.attention_dq`.
    """
    q, k, dout = (dense_rows(x) for x in (inputs.q, inputs.k, dout))
    (batch, queries, heads, channels), dim = q.shape, dout.shape[3]
    dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    delta = torch.empty_like(logsumexp)
    _delta_kernel[batch * queries, -(-heads // _TAKEN)](
        *(dout, result, delta, *dout.stride()[:3], queries, heads), D=dim, ROWS=_TAKEN
    )

    def launch(kernel: Any, held: int, where: Places, gradient: Tensor, rows: int, keys: int) -> None:
        positions, new, _ = where
        kernel[tiles_of(held, _HELD, new), batch](
            *(q, k, dout, logsumexp, delta, *where, 0 if new is None else len(new), gradient),
            *(*q.stride()[:3], *k.stride()[:2], *dout.stride()[:3], *positions.stride()),
            *(queries, k.shape[1], inputs.scale * LOG2_E, inputs.scale),
            PACKED=packed_constant(new),
            HEADS=heads,
            D=dim,
            TAIL=channels - dim,
            ROWS=rows,
            KEYS=keys,
            num_warps=8,
            num_stages=stages_of(dim, channels - dim),
        )

    launch(_dq_kernel, queries * heads, places_of_queries(inputs), dq, _HELD, _TAKEN)
    launch(_dk_kernel, k.shape[1], places_of_keys(inputs), dk, _TAKEN, _HELD)
    return dq, dk


@triton.jit(do_not_specialize=["queries"])
def _delta_kernel(
    dout_ptr, result_ptr, delta_ptr, dout_batch, dout_token, dout_head, queries, heads,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The term that the softmax's gradient subtracts in each row."""
    token, head, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    exists = head < heads
    from_ptr = dout_ptr + token // queries * dout_batch + token % queries * dout_token
    dout = tl.load(from_ptr + head[:, None] * dout_head + column[None, :], mask=exists[:, None], other=0.0)
    where = token * heads + head
    result = tl.load(result_ptr + where[:, None] * D + column[None, :], mask=exists[:, None], other=0.0)
    tl.store(delta_ptr + where, tl.sum(dout.to(tl.float32) * result.to(tl.float32), 1), mask=exists)


@triton.jit(do_not_specialize=["positions_row", "sequences", "queries", "keys"])
def _dq_kernel(
    q_ptr, k_ptr, dout_ptr, logsumexp_ptr, delta_ptr, positions_ptr, new_ptr, paths_ptr, sequences, dq_ptr,
    q_batch, q_token, q_head, k_batch, k_token, dout_batch, dout_token, dout_head, positions_row, positions_column,
    queries, keys, exp2_scale, scale,
    PACKED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """PACKED and pointers: as in `backward`. HEADS: number of heads of a token; they all share its keys."""
    PAGED: tl.constexpr = paths_ptr is not None
    sequence = tl.program_id(1).to(tl.int64)
    if PACKED:
        place, tile, first, queries = find_sequence(new_ptr, sequences, PACKED, HEADS, ROWS)
        if place >= sequences:
            return
        keys, first = tl.load(paths_ptr + place).to(tl.int32) if PAGED else queries, first.to(tl.int64)
    else:
        tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
        first = sequence * queries
    q_ptr += first * q_token if PACKED else sequence * q_batch
    dout_ptr += first * dout_token if PACKED else sequence * dout_batch
    if PAGED:
        positions_ptr += place.to(tl.int64) * positions_row
    else:
        k_ptr += first * k_token if PACKED else sequence * k_batch
        positions_ptr += first if PACKED else sequence * positions_row
    last = queries * HEADS - 1  # rows beyond it repeat it, and are not stored
    row = tl.minimum(tile * ROWS + tl.arange(0, ROWS), last)
    query = row // HEADS
    if PAGED:
        position = keys - queries + query
    else:
        position = tl.load(positions_ptr + query.to(tl.int64) * positions_column).to(tl.int32)
    logsumexp, delta = tl.load(logsumexp_ptr + first * HEADS + row), tl.load(delta_ptr + first * HEADS + row)
    column, tail = tl.arange(0, D)[None, :], D + tl.arange(0, TAIL)[None, :]
    of_query = (tl.arange(0, 2 * ROWS) % 2 == 0)[:, None]
    both_ptr = _pairs(q_ptr, dout_ptr, q_token, q_head, dout_token, dout_head, tile * ROWS, last, HEADS, ROWS)
    both, both_tail = tl.load(both_ptr + column), tl.load(both_ptr + tail, mask=of_query, other=0.0)

    dq = tl.zeros((ROWS, D), tl.float32)
    dq_tail = tl.zeros((ROWS, TAIL), tl.float32)
    slot = key_slots(positions_ptr, 0, keys, positions_column, PAGED, KEYS)
    for start in tl.range(0, tl.minimum(tl.max(position) + 1, keys), KEYS, disable_licm=True):
        key = start + tl.arange(0, KEYS)
        exists = (key < keys)[:, None]
        k_row = k_ptr + (slot.to(tl.int64) * k_token)[:, None]
        k, k_tail = tl.load(k_row + column, mask=exists, other=0.0), tl.load(k_row + tail, mask=exists, other=0.0)
        products = dot(both, tl.trans(k), tl.zeros((2 * ROWS, KEYS), tl.float32))
        products = dot(both_tail, tl.trans(k_tail), products)
        scores, dweights = tl.split(tl.permute(tl.reshape(products, (ROWS, 2, KEYS)), (0, 2, 1)))
        weights = tl.exp2(tl.fma(scores, exp2_scale, -logsumexp[:, None]))
        weights = tl.where((key[None, :] <= position[:, None]) & (key < keys)[None, :], weights, 0.0)
        dscores = cast(weights * (dweights - delta[:, None]), tl.bfloat16)
        dq = dot(dscores, k, dq)
        dq_tail = dot(dscores, k_tail, dq_tail)
        slot = key_slots(positions_ptr, start + KEYS, keys, positions_column, PAGED, KEYS)
    place = tl.arange(0, ROWS)[:, None]
    dq_ptr += (first * HEADS + tile * ROWS) * (D + TAIL)
    stored = tile * ROWS + place <= last
    tl.store(dq_ptr + (place * (D + TAIL) + column), cast(dq * scale, tl.bfloat16), mask=stored)
    tl.store(dq_ptr + (place * (D + TAIL) + tail), cast(dq_tail * scale, tl.bfloat16), mask=stored)


@triton.jit(do_not_specialize=["positions_row", "sequences", "queries", "keys"])
def _dk_kernel(
    q_ptr, k_ptr, dout_ptr, logsumexp_ptr, delta_ptr, positions_ptr, new_ptr, end_ptr, sequences, dk_ptr,
    q_batch, q_token, q_head, k_batch, k_token, dout_batch, dout_token, dout_head, positions_row, positions_column,
    queries, keys, exp2_scale, scale,
    PACKED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1).to(tl.int64)
    if PACKED:
        place, tile, first, queries = find_sequence(new_ptr, sequences, PACKED, 1, KEYS)
        if place >= sequences:
            return
        keys, first = queries, first.to(tl.int64)
    else:
        tile = tl.program_id(0)
        first = sequence * queries
    q_ptr += first * q_token if PACKED else sequence * q_batch
    k_ptr += first * k_token if PACKED else sequence * k_batch
    dout_ptr += first * dout_token if PACKED else sequence * dout_batch
    positions_ptr += first if PACKED else sequence * positions_row
    dk_ptr += (first if PACKED else sequence * keys) * (D + TAIL)
    key = tile * KEYS + tl.arange(0, KEYS)
    column, tail = tl.arange(0, D)[None, :], D + tl.arange(0, TAIL)[None, :]
    k_ptr += (tl.minimum(key, keys - 1).to(tl.int64) * k_token)[:, None]
    k, k_tail = tl.load(k_ptr + column), tl.load(k_ptr + tail)
    logsumexp_ptr += first * HEADS
    delta_ptr += first * HEADS
    of_query = (tl.arange(0, 2 * ROWS) % 2 == 0)[:, None]
    last = queries * HEADS - 1

    dk = tl.zeros((KEYS, D), tl.float32)
    dk_tail = tl.zeros((KEYS, TAIL), tl.float32)
    begin = first_query_at(tile * KEYS, positions_ptr, positions_column, queries) * HEADS // ROWS * ROWS
    stop = queries
    if end_ptr is not None:
        end = tl.load(end_ptr + key, mask=key < keys, other=0).to(tl.int32)
        stop = tl.max(end, 0)
    for start in tl.range(begin, stop * HEADS, ROWS, disable_licm=True):
        row = start + tl.arange(0, ROWS)
        real = row <= last
        query = (row // HEADS).to(tl.int64)
        position = tl.load(positions_ptr + query * positions_column, mask=real, other=-1).to(tl.int32)
        logsumexp = tl.load(logsumexp_ptr + row, mask=real, other=0.0)
        delta = tl.load(delta_ptr + row, mask=real, other=0.0)
        both_ptr = _pairs(q_ptr, dout_ptr, q_token, q_head, dout_token, dout_head, start, last, HEADS, ROWS)
        both, both_tail = tl.load(both_ptr + column), tl.load(both_ptr + tail, mask=of_query, other=0.0)
        products = dot(k, tl.trans(both), tl.zeros((KEYS, 2 * ROWS), tl.float32))
        products = dot(k_tail, tl.trans(both_tail), products)
        scores, dweights = tl.split(tl.reshape(products, (KEYS, ROWS, 2)))
        weights = tl.exp2(tl.fma(scores, exp2_scale, -logsumexp[None, :]))
        seen = key[:, None] <= position[None, :]
        if end_ptr is not None:
            seen &= position[None, :] < end[:, None]
        weights = tl.where(seen, weights, 0.0)
        dscores = weights * (dweights - delta[None, :]) * scale
        factors = cast(tl.reshape(tl.join(dscores, weights), (KEYS, 2 * ROWS)), tl.bfloat16)
        dk = dot(factors, both, dk)
        dk_tail = dot(factors, both_tail, dk_tail)
    place = tl.arange(0, KEYS)[:, None]
    dk_ptr += tile.to(tl.int64) * KEYS * (D + TAIL)
    stored = tile * KEYS + place < keys
    tl.store(dk_ptr + (place * (D + TAIL) + column), cast(dk, tl.bfloat16), mask=stored)
    tl.store(dk_ptr + (place * (D + TAIL) + tail), cast(dk_tail, tl.bfloat16), mask=stored)


@triton.jit
def _pairs(
    q_ptr, dout_ptr, q_token, q_head, dout_token, dout_head, start, last, HEADS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Return pointers [2 ROWS, 1] for the rows from `start` on: for each row to its query, then to its result's
    gradient. The gradient has D channels; the numbers after them belong to another row."""
    pair = tl.arange(0, 2 * ROWS)
    row, first = tl.minimum(start + pair // 2, last), start // HEADS
    query, head = row // HEADS - first, row % HEADS  # within the tile, where 32 bits are enough
    q_ptr += tl.cast(first, tl.int64) * q_token
    dout_ptr += tl.cast(first, tl.int64) * dout_token
    q_ptr += query * q_token + head * q_head
    dout_ptr += query * dout_token + head * dout_head
    return tl.where(pair % 2 == 0, q_ptr, dout_ptr)[:, None]
