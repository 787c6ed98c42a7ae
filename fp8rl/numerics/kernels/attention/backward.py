"""Computes the gradient of `forward` by the two kernels of FlashAttention 2 (Dao 2023), without atomics.

Attention weights are computed again from the saved log-sum-exp. One kernel holds a tile of queries and adds over keys
(dq). The other holds a tile of keys, and adds over queries and over the heads that share the keys (dk and dv). Both add
in a fixed order, so the gradient is the same in every run. Sums are in FP32; weights and score gradients are rounded to
BF16 for their products.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from fp8rl.numerics.kernels.arithmetic import cast, dense_rows, dot, load
from fp8rl.numerics.kernels.attention.chunks import find_sequence, key_slots
from fp8rl.numerics.ops.attention import AttentionInputs

LOG2_E = math.log2(math.e)
"""exp(x) = exp2(x * LOG2_E)"""
_LARGE, _SMALL = (128, 64), (64, 64)  # rows or keys that a program holds, and takes at a time
_SEQUENCES = 16  # end to end, among which a program finds its own, at least: one compiled kernel for few of them


def attention_dq(dout: Tensor, inputs: AttentionInputs, result: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `numerics.ops.attention.attention_dq`. logsumexp: log2 of the sum of exp2(score * scale * LOG2_E)."""
    dq = torch.empty(inputs.q.shape, dtype=inputs.q.dtype, device=inputs.q.device)
    delta = torch.empty_like(logsumexp)
    group = inputs.q.shape[2] // inputs.k.shape[2]
    long, short = _LARGE if inputs.q.shape[3] <= 128 else _SMALL
    where = places_of_queries(inputs)
    tiles = tiles_of(inputs.q.shape[1] * group, long, where[1])
    _launch(_dq_kernel, tiles, dout, inputs, (result, logsumexp, delta), where, (dq,), ROWS=long, KEYS=short)
    return dq, delta


def attention_dkv(dout: Tensor, inputs: AttentionInputs, logsumexp: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (inputs.k, inputs.v))
    long, short = _LARGE if inputs.q.shape[3] <= 128 else _SMALL
    tiles, where = tiles_of(inputs.k.shape[1], long, inputs.lengths), places_of_keys(inputs)
    _launch(_dkv_kernel, tiles, dout, inputs, (dout, logsumexp, delta), where, (dk, dv), ROWS=short, KEYS=long)
    return dk, dv


def _launch(
    kernel: Any,
    tiles: int,
    dout: Tensor,
    inputs: AttentionInputs,
    of_rows: tuple[Tensor, ...],
    where: Places,
    gradients: tuple[Tensor, ...],
    **sizes: int,
) -> None:
    """Launch a kernel. of_rows: the result (which the dkv kernel does not read), log-sum-exp, and softmax's term."""
    q, k, v, dout = (dense_rows(x) for x in (inputs.q, inputs.k, inputs.v, dout))
    positions, new, _ = where
    kernel[tiles, k.shape[2], len(q)](
        *(q, k, v, dout, *of_rows, *where, 0 if new is None else len(new), *gradients),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3], *positions.stride()),
        *(q.shape[1], k.shape[1], q.shape[2], inputs.scale * LOG2_E, inputs.scale),
        PACKED=packed_constant(new),
        GROUP=q.shape[2] // k.shape[2],
        D=q.shape[3],
        **sizes,
        num_warps=8,
        num_stages=stages_of(q.shape[3]),
    )


Places = tuple[Tensor, Tensor | None, Tensor | None]
"""What `places_of_queries` and `places_of_keys` return."""


def places_of_queries(inputs: AttentionInputs) -> Places:
    """Return the arguments by which the dq kernel finds a query's keys: (positions, lengths of sequences that are end
    to end, None), or for a tree its (table, new, lengths), see `TokenTree`."""
    tree = inputs.tree
    return (inputs.positions, inputs.lengths, None) if tree is None else (tree.table, tree.new, tree.lengths)


def places_of_keys(inputs: AttentionInputs) -> Places:
    """Return the arguments by which the dkv kernel finds a key's queries: (positions, lengths of sequences that are end
    to end, for a tree the end of each token's interval)."""
    return inputs.positions, inputs.lengths, None if inputs.tree is None else inputs.tree.end


def packed_constant(lengths: Tensor | None) -> int:
    """Return a power of two, at least the number of sequences that are end to end; 0: each row is a sequence."""
    return 0 if lengths is None else max(_SEQUENCES, triton.next_power_of_2(len(lengths)))


def tiles_of(rows: int, height: int, lengths: Tensor | None) -> int:
    """Return the number of tiles of one sequence, or the most tiles that sequences end to end can need."""
    return -(-rows // height) if lengths is None else rows // height + len(lengths)


def stages_of(dim: int, tail: int = 0) -> int:
    """Return the number of stages in which a loop over keys or rows copies them into shared memory.

    With three stages the copies for the next step are under way while a step is computed. With two stages a step waits
    for all copies, and none are under way while it is computed. dim: the channels of a value. tail: the channels of a
    key after its value's channels, if the value is a part of the key. A block on Hopper has 227 KiB of shared memory;
    three stages take up to 225 KiB, or more with 256 channels and no tail. A block on Ada has 99 KiB. As compiled for
    Blackwell, three stages with a tail take 249 KiB.
    """
    hopper = cuda_capability_geq(9) and not cuda_capability_geq(10)
    return 3 if hopper and (dim <= 128 or tail) else 2


@triton.jit(do_not_specialize=["positions_row", "sequences", "queries", "keys"])
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, out_ptr, logsumexp_ptr, delta_ptr, positions_ptr, new_ptr, paths_ptr, sequences,
    dq_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    dout_batch, dout_token, dout_head, positions_row, positions_column, queries, keys, heads, exp2_scale, scale,
    PACKED: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """PACKED: as `packed_constant` gives it. positions_ptr, new_ptr, paths_ptr: `Places`."""
    PAGED: tl.constexpr = paths_ptr is not None
    key_head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    if PACKED:
        place, tile, first, queries = find_sequence(new_ptr, sequences, PACKED, GROUP, ROWS)
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
        v_ptr += first * v_token if PACKED else sequence * v_batch
        positions_ptr += first if PACKED else sequence * positions_row
    k_ptr += key_head * k_head
    v_ptr += key_head * v_head
    row = tile * ROWS + tl.arange(0, ROWS)
    stored = row < queries * GROUP
    query = tl.minimum(row // GROUP, queries - 1).to(tl.int64)
    head = key_head * GROUP + row % GROUP
    column = tl.arange(0, D)
    position = (keys - queries + query if PAGED else tl.load(positions_ptr + query * positions_column)).to(tl.int32)
    q = tl.load(q_ptr + (query * q_token + head * q_head)[:, None] + column[None, :])
    dout = tl.load(dout_ptr + (query * dout_token + head * dout_head)[:, None] + column[None, :])
    where = (first + query) * heads + head
    out = tl.load(out_ptr + where[:, None] * D + column[None, :])
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + where, delta, mask=stored)
    logsumexp = tl.load(logsumexp_ptr + where)

    dq = tl.zeros((ROWS, D), tl.float32)
    stop = tl.minimum(tl.max(position) + 1, keys)
    whole = tl.minimum(tl.maximum(tl.min(position) + 1, 0), keys) // KEYS * KEYS  # every row sees all of these
    slot = key_slots(positions_ptr, 0, keys, positions_column, PAGED, KEYS)
    for MASKED in tl.static_range(2):
        for start in range(whole if MASKED else 0, stop if MASKED else whole, KEYS):
            key = start + tl.arange(0, KEYS)
            exists = key < keys
            far = slot.to(tl.int64)[:, None]
            k = load(k_ptr + far * k_token + column[None, :], exists[:, None], MASKED)
            scores = dot(q, tl.trans(k), tl.zeros((ROWS, KEYS), tl.float32))
            v = load(v_ptr + far * v_token + column[None, :], exists[:, None], MASKED)
            weights = tl.exp2(tl.fma(scores, exp2_scale, -logsumexp[:, None]))
            if MASKED:
                weights = tl.where((key[None, :] <= position[:, None]) & exists[None, :], weights, 0.0)
            dweights = dot(dout, tl.trans(v), tl.zeros((ROWS, KEYS), tl.float32))
            dscores = weights * (dweights - delta[:, None])
            dq = dot(cast(dscores, tl.bfloat16), k, dq)
            slot = key_slots(positions_ptr, start + KEYS, keys, positions_column, PAGED, KEYS)
    tl.store(dq_ptr + where[:, None] * D + column[None, :], cast(dq * scale, tl.bfloat16), mask=stored[:, None])


@triton.jit(do_not_specialize=["positions_row", "sequences", "queries", "keys"])
def _dkv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, out_ptr, logsumexp_ptr, delta_ptr, positions_ptr, new_ptr, end_ptr, sequences,
    dk_ptr, dv_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    dout_batch, dout_token, dout_head, positions_row, positions_column, queries, keys, heads, exp2_scale, scale,
    PACKED: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    key_head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    if PACKED:
        place, tile, first, queries = find_sequence(new_ptr, sequences, PACKED, 1, KEYS)
        if place >= sequences:
            return
        keys, first = queries, first.to(tl.int64)
        first_key = first
    else:
        tile = tl.program_id(0)
        first, first_key = sequence * queries, sequence * keys
    q_ptr += (first * q_token if PACKED else sequence * q_batch) + key_head * GROUP * q_head
    k_ptr += (first * k_token if PACKED else sequence * k_batch) + key_head * k_head
    v_ptr += (first * v_token if PACKED else sequence * v_batch) + key_head * v_head
    dout_ptr += (first * dout_token if PACKED else sequence * dout_batch) + key_head * GROUP * dout_head
    positions_ptr += first if PACKED else sequence * positions_row
    key = tile * KEYS + tl.arange(0, KEYS)
    exists = key < keys
    column = tl.arange(0, D)
    far = tl.minimum(key, keys - 1).to(tl.int64)[:, None]
    k = tl.load(k_ptr + far * k_token + column[None, :])
    v = tl.load(v_ptr + far * v_token + column[None, :])

    dk = tl.zeros((KEYS, D), tl.float32)
    dv = tl.zeros((KEYS, D), tl.float32)
    begin = first_query_at(tile * KEYS, positions_ptr, positions_column, queries) * GROUP // ROWS * ROWS
    stop = queries
    if end_ptr is not None:
        end = tl.load(end_ptr + key, mask=exists, other=0).to(tl.int32)
        stop = tl.max(end, 0)
    for start in range(begin, stop * GROUP, ROWS):
        row = start + tl.arange(0, ROWS)
        real = row < queries * GROUP
        query = (row // GROUP).to(tl.int64)
        head = row % GROUP
        position = tl.load(positions_ptr + query * positions_column, mask=real, other=-1).to(tl.int32)
        where = (first + query) * heads + key_head * GROUP + head
        logsumexp = tl.load(logsumexp_ptr + where, mask=real, other=0.0)
        delta = tl.load(delta_ptr + where, mask=real, other=0.0)
        q_row, dout_row = query * q_token + head * q_head, query * dout_token + head * dout_head
        q = tl.load(q_ptr + q_row[:, None] + column[None, :], mask=real[:, None], other=0.0)
        dout = tl.load(dout_ptr + dout_row[:, None] + column[None, :], mask=real[:, None], other=0.0)
        scores = dot(k, tl.trans(q), tl.zeros((KEYS, ROWS), tl.float32))
        weights = tl.exp2(tl.fma(scores, exp2_scale, -logsumexp[None, :]))
        seen = key[:, None] <= position[None, :]
        if end_ptr is not None:
            seen &= position[None, :] < end[:, None]
        weights = tl.where(seen, weights, 0.0)
        dweights = dot(v, tl.trans(dout), tl.zeros((KEYS, ROWS), tl.float32))
        dscores = weights * (dweights - delta[None, :])
        dv = dot(cast(weights, tl.bfloat16), dout, dv)
        dk = dot(cast(dscores, tl.bfloat16), q, dk)
    where = ((first_key + far) * (heads // GROUP) + key_head) * D + column[None, :]
    tl.store(dk_ptr + where, cast(dk * scale, tl.bfloat16), mask=exists[:, None])
    tl.store(dv_ptr + where, cast(dv, tl.bfloat16), mask=exists[:, None])


@triton.jit
def first_query_at(position, positions_ptr, positions_column, queries):
    """Return the first query at or after this position, or `queries` if there is none."""
    BLOCK: tl.constexpr = 1024
    first = queries
    for start in range(0, queries, BLOCK):
        query = start + tl.arange(0, BLOCK)
        found = tl.load(positions_ptr + query.to(tl.int64) * positions_column, mask=query < queries, other=-1)
        first = tl.minimum(first, tl.min(tl.where(found >= position, query, queries), 0))
    return first
