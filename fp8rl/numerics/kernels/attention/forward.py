"""Computes causal attention on the tensor core (`numerics.ops.attention`): contiguous, packed and paged.

A program holds 128 rows, or 64 in decode (`tile_height`). A row is one head of one query; the heads that share a key
head are together, so that a new token fills several rows. The program takes the keys of a chunk in splits of 128, in
order, and merges the splits with the online softmax (Milakov and Gimelshein 2018) as FlashAttention 2 does (Dao 2023).
Chunks are merged in order, by the same program or, if chunks are spread over programs, by a second kernel (`chunks`). A
split or chunk that a row does not see multiplies its sums by 1 and adds 0. So a query's bits depend only on the query
and the keys that it sees.

Rounding: scores and sums are in FP32. Weights are rounded to BF16 for their product with the values (the definition
keeps FP32). The product is summed in FP32 and rounded once. A multiplication before an addition is written as `tl.fma`,
and the compiler may fuse no others, because the loops with and without mask must agree in every bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.kernels.arithmetic import cast, dense_rows, dot, load
from fp8rl.numerics.kernels.attention.backward import (
    LOG2_E,
    attention_dkv,
    attention_dq,
    packed_constant,
    stages_of,
    tiles_of,
)
from fp8rl.numerics.kernels.attention.chunks import (
    divided,
    find_sequence,
    key_slots,
    merge_chunk,
    merge_parts,
    no_keys,
    parts_of,
    positions_of,
)
from fp8rl.numerics.kernels.products.tiles import SHORT, TALL, tile_height, warps
from fp8rl.numerics.kv import CODES
from fp8rl.numerics.ops.attention import KEY_CHUNK, AttentionInputs, TokenTree

CONTIGUOUS, PACKED, PAGED = "contiguous", "packed", "paged"


def attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Compute `numerics.ops.attention` for positions that are not negative and a scale above 0. Raises UserError for a
    dtype other than BF16, values of another width than keys, or a head size that is no power of two from 16 to 256."""
    check(q, k, v)
    return Attention.apply(*(dense_rows(x) for x in (q, k, v)), positions, scale)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Compute `numerics.ops.packed_attention` without a wait for the device: as in `paged_attention` the grid is the
    largest that may be needed."""
    check(q, k, v)
    rows = (dense_rows(x)[None] for x in (q, k, v))
    return Attention.apply(*rows, positions_of(lengths, len(q))[None], scale, lengths.contiguous())[0]


class Attention(torch.autograd.Function):
    """`attention` of the fields of `AttentionInputs`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        scale: float,
        lengths: Tensor | None = None,
        tree: TokenTree | None = None,
    ) -> Tensor:
        out, logsumexp = attend(AttentionInputs(q, k, v, positions, scale, lengths, tree))
        ctx.save_for_backward(q, k, v, positions, lengths, out, logsumexp)
        ctx.scale, ctx.tree = scale, tree
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, positions, lengths, out, logsumexp = ctx.saved_tensors
        inputs, dout = AttentionInputs(q, k, v, positions, ctx.scale, lengths, ctx.tree), dense_rows(grads[0])
        dq, delta = attention_dq(dout, inputs, out, logsumexp)
        return dq, *attention_dkv(dout, inputs, logsumexp, delta), None, None, None, None


def attention_forward(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """See `numerics.ops.attention.attention_forward`. The result is rounded; the logarithm is as in `attention_dq`."""
    check(inputs.q, inputs.k, inputs.v)
    out, logsumexp = attend(inputs)
    return out, out, logsumexp


def attend(inputs: AttentionInputs, tail: int = 0) -> tuple[Tensor, Tensor]:
    """Return the result of `attention` and its log-sum-exp, FP32 [B, Q, heads]. The caller has checked the inputs.

    tail: `TAIL` of the kernel; v is then the first channels of k.
    """
    q, k, v = (dense_rows(x) for x in (inputs.q, inputs.k, inputs.v))
    (batch, length, heads, _), dim = q.shape, v.shape[3]
    out = torch.empty(*q.shape[:3], dim, dtype=q.dtype, device=q.device)
    logsumexp = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    group, height = heads // k.shape[2], SHORT if tail else TALL
    form, places, new, lengths = CONTIGUOUS, inputs.positions, inputs.lengths, inputs.lengths
    if inputs.lengths is not None:
        form = PACKED
    if inputs.tree is not None:  # whose tokens are the slots of a cache
        form, places, new, lengths = PAGED, inputs.tree.table, inputs.tree.new, inputs.tree.lengths
    sequences, longest = batch if new is None else len(new), places.shape[1] if form == PAGED else k.shape[1]
    _forward_kernel[tiles_of(length * group, height, new), k.shape[2], batch](
        *(q, k, v, out, logsumexp, places, None, new, lengths, None, None, None),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *places.stride()),
        *(sequences, length, k.shape[1], heads, inputs.scale * LOG2_E),
        **_constants(form, packed_constant(new) or 1, group, dim, height, longest, tail),
    )
    return out, logsumexp


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
    """Compute `numerics.ops.paged_attention` without a wait for the device: the grid is the largest that this many
    tokens of this many sequences can need, with as many keys as the table is wide. Programs without work end at once.
    """
    check(q, k_cache, v_cache, CODES)
    return attend_paged(q, k_cache, v_cache, table, requests, new, lengths, scale)


def attend_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    requests: Tensor,
    new: Tensor | None,
    lengths: Tensor,
    scale: float,
    tail: int = 0,
) -> Tensor:
    """Compute `paged_attention`. The caller has checked the arguments. tail: as in `attend`."""
    (tokens, heads, _), dim = q.shape, v_cache.shape[2]
    sequences, group = len(requests), heads // k_cache.shape[1]
    requests, lengths = requests.contiguous(), lengths.contiguous()
    q, k_cache, v_cache = (dense_rows(x) for x in (q, k_cache, v_cache))
    if new is None:  # of every token a result is stored
        out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    else:
        new, out = new.contiguous(), torch.zeros(tokens, heads, dim, dtype=q.dtype, device=q.device)
    # Rows of a sequence in the mean; the accumulators of a larger head would leave a short tile's registers.
    height = tile_height(-(-tokens * group // max(sequences, 1))) if dim <= 128 else SHORT if tail else TALL
    most_tiles = tokens * group // height + sequences
    longest, tiles = table.shape[1], most_tiles * k_cache.shape[1]
    parts = parts_of(out, k_cache.shape[1], longest, tiles)
    left = (parts.outs, parts.peaks, parts.totals) if parts else (None, None, None)
    _forward_kernel[most_tiles, k_cache.shape[1], parts.programs if parts else 1](
        *(q, k_cache, v_cache, out, None, table, requests, new, lengths, *left),
        *(0, *q.stride()[:2], 0, *k_cache.stride()[:2], 0, *v_cache.stride()[:2], *table.stride()),
        *(sequences, tokens, 0, heads, scale * LOG2_E),
        **_constants(
            *(PAGED, triton.next_power_of_2(max(sequences, 1)), group, dim, height, longest, tail, parts is not None)
        ),
    )
    if parts:
        merge_parts(parts, out, new, lengths, scale * LOG2_E)
    return out


def _constants(
    form: str, sequences: int, group: int, dim: int, height: int, longest: int, tail: int = 0, spread: bool = False
) -> dict[str, Any]:
    # Of larger heads, two stages of 128 keys do not fit into shared memory, nor of a latent the pointers to 64.
    keys = 32 if tail else 128 if dim <= 128 else 64
    shape = {"FORM": form, "SEQUENCES": sequences, "GROUP": group, "ROWS": height, "KEYS": keys, "D": dim, "TAIL": tail}
    chunks = {"CHUNK": KEY_CHUNK, "CHUNKED": longest > KEY_CHUNK, "SPREAD": spread}
    threads = 8 if tail else warps(height)  # the sums of a latent's 512 channels take two warp groups' registers
    return shape | chunks | {"num_warps": threads, "num_stages": stages_of(dim, tail), "enable_fp_fusion": False}


def check_dtypes(q: Tensor, *keys: Tensor, kept: torch.dtype = torch.bfloat16) -> None:
    """Raise UserError unless all are BF16. kept: a dtype that all keys and values may have in its place."""
    if q.dtype != torch.bfloat16 or {x.dtype for x in keys} not in ({torch.bfloat16}, {kept}):
        dtypes = [str(x.dtype) for x in (q, *keys)]
        expected = "BF16 q, k and v" + ("" if kept == torch.bfloat16 else f", or k and v in {kept}")
        raise user_error("attention", found=dtypes, expected=expected, remedy="Cast them.")


def check(q: Tensor, k: Tensor, v: Tensor, kept: torch.dtype = torch.bfloat16) -> None:
    """Raise UserError unless the kernels know these dtypes and head sizes. kept: see `check_dtypes`."""
    dim = q.shape[-1]
    check_dtypes(q, k, v, kept=kept)
    if not 16 <= dim <= 256 or dim & (dim - 1):
        expected = "a power of two from 16 to 256"
        raise user_error("attention head size", found=dim, expected=expected, remedy="Run the ops on torch.")
    if k.shape != v.shape or k.shape[-1] != dim or q.shape[-2] % k.shape[-2]:
        found = [list(x.shape) for x in (q, k, v)]
        expected = "k and v of one shape, with q's D, and kv heads that divide q's heads"
        raise user_error("attention", found=found, expected=expected, remedy="Check the model's head counts.")


@triton.jit(do_not_specialize=["positions_row", "sequences", "queries", "keys"])
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, logsumexp_ptr, positions_ptr, requests_ptr, new_ptr, lengths_ptr,
    outs_ptr, peaks_ptr, totals_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, positions_row, positions_column,
    sequences, queries, keys, heads, scale,
    FORM: tl.constexpr, SEQUENCES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, TAIL: tl.constexpr, CHUNK: tl.constexpr, CHUNKED: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """FORM: `contiguous`, queries [B, Q]; `packed`, sequences end to end; `paged`, over a cache. positions_ptr: the
    positions of queries, or for a paged cache the table [rows, max]. requests_ptr: each sequence's row of the table;
    None: row b is sequence b's. logsumexp_ptr: None if there is no gradient.

    TAIL: channels of a key after the D channels that are also its value (`latent`); 0: values are separate. CHUNKED:
    there may be more keys than one chunk has. SPREAD: every program takes some of the chunks, and stores a part for
    each (`Parts`).
    """
    PAGED: tl.constexpr = FORM == "paged"
    key_head, tokens = tl.program_id(1), queries
    if FORM == "contiguous":
        sequence, tile = tl.program_id(2), tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
        first = sequence * queries
        q_ptr += sequence.to(tl.int64) * q_batch
        k_ptr += sequence.to(tl.int64) * k_batch
        v_ptr += sequence.to(tl.int64) * v_batch
        positions_ptr += sequence.to(tl.int64) * positions_row
    else:
        sequence, tile, first, queries = find_sequence(new_ptr, sequences, SEQUENCES, GROUP, ROWS)
        if sequence >= sequences:
            return
        keys = tl.load(lengths_ptr + sequence).to(tl.int32)
        if PAGED:
            request = sequence if requests_ptr is None else tl.load(requests_ptr + sequence)
            positions_ptr += request.to(tl.int64) * positions_row
        else:
            q_ptr += first.to(tl.int64) * q_token
            k_ptr += first.to(tl.int64) * k_token
            v_ptr += first.to(tl.int64) * v_token
            positions_ptr += first

    row = tile * ROWS + tl.arange(0, ROWS)
    query = tl.minimum(row // GROUP, queries - 1)  # rows beyond the last repeat it, and are not stored
    head = key_head * GROUP + row % GROUP
    token = (first + query).to(tl.int64)
    column = tl.arange(0, D)
    if PAGED:
        position = keys - queries + query
        q_row = token * q_token
    else:
        position = tl.load(positions_ptr + query.to(tl.int64) * positions_column).to(tl.int32)
        q_row = query.to(tl.int64) * q_token
    q_ptr += (q_row + head * q_head)[:, None]
    q = tl.load(q_ptr + column[None, :])
    q_tail = tl.load(q_ptr + D + tl.arange(0, TAIL)[None, :]) if TAIL else q
    k_ptr += key_head * k_head
    v_ptr += key_head * v_head

    stop = tl.minimum(tl.max(position) + 1, keys)
    whole = tl.minimum(tl.maximum(tl.min(position) + 1, 0), keys) // KEYS * KEYS  # every row sees all of these
    stored = row < queries * GROUP
    where = token * heads + head
    if CHUNKED:
        peak, total, out = no_keys(ROWS, D)
        step = tl.num_programs(2) * CHUNK if SPREAD else CHUNK
        for start in range(tl.program_id(2) * CHUNK if SPREAD else 0, stop, step):
            chunk_peak, chunk_total, chunk_out = _attend_chunk(
                q, q_tail, k_ptr, v_ptr, positions_ptr, start, tl.minimum(start + CHUNK, stop), whole, keys, position,
                positions_column, k_token, v_token, scale, PAGED, KEYS, D, TAIL,
            )  # fmt: skip
            if SPREAD:
                part = ((start // CHUNK * tl.num_programs(1) + key_head) * tokens + first) * GROUP + row
                tl.store(peaks_ptr + part, chunk_peak, mask=stored)
                tl.store(totals_ptr + part, chunk_total, mask=stored)
                tl.store(outs_ptr + part[:, None] * D + column[None, :], chunk_out, mask=stored[:, None])
            else:
                peak, total, out = merge_chunk(peak, total, out, chunk_peak, chunk_total, chunk_out, scale)
    else:
        peak, total, out = _attend_chunk(
            q, q_tail, k_ptr, v_ptr, positions_ptr, 0, stop, whole, keys, position,
            positions_column, k_token, v_token, scale, PAGED, KEYS, D, TAIL,
        )  # fmt: skip

    if not SPREAD:
        result, total = divided(out, total)
        tl.store(out_ptr + where[:, None] * D + column[None, :], cast(result, tl.bfloat16), mask=stored[:, None])
        if logsumexp_ptr is not None:
            tl.store(logsumexp_ptr + where, tl.fma(peak, scale, tl.log2(total)), mask=stored)


@triton.jit
def _attend_chunk(
    q, q_tail, k_ptr, v_ptr, table_ptr, first, stop, whole, keys, position, table_column, k_token, v_token, scale,
    PAGED: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Return peak, total and out of the rows over the keys first to stop of one chunk."""
    peak, total, out = no_keys(q.shape[0], D)
    whole = tl.minimum(tl.maximum(whole, first), stop // KEYS * KEYS)
    slot = key_slots(table_ptr, first, keys, table_column, PAGED, KEYS)
    for MASKED in tl.static_range(2):
        for start in tl.range(whole if MASKED else first, stop if MASKED else whole, KEYS, disable_licm=TAIL > 0):
            peak, total, out = _merge_split(
                q, q_tail, k_ptr, v_ptr, slot, start, keys, position, peak, total, out, k_token, v_token, scale,
                MASKED, KEYS, D, TAIL,
            )  # fmt: skip
            # The next split's, ahead of its keys, whose loads would wait for them.
            slot = key_slots(table_ptr, start + KEYS, keys, table_column, PAGED, KEYS)
    return peak, total, out


@triton.jit
def _merge_split(
    q, q_tail, k_ptr, v_ptr, slot, start, keys, position, peak, total, out, k_token, v_token, scale,
    MASKED: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Add keys start to start + KEYS. Without MASKED all of them exist, and every row sees them."""
    key = start + tl.arange(0, KEYS)
    exists = key < keys
    column, slot = tl.arange(0, D), slot.to(tl.int64)
    # Keys that do not exist are zeros, for 0 times what lies there might be NaN.
    if TAIL:
        v = load(k_ptr + (slot * k_token)[:, None] + column[None, :], exists[:, None], MASKED).to(q.dtype)
        tail = load(k_ptr + D + (slot * k_token)[None, :] + tl.arange(0, TAIL)[:, None], exists[None, :], MASKED)
        tail = tail.to(q.dtype)
        scores = dot(q_tail, tail, dot(q, tl.trans(v), tl.zeros((q.shape[0], KEYS), tl.float32)))
    else:
        k = load(k_ptr + (slot * k_token)[None, :] + column[:, None], exists[None, :], MASKED).to(q.dtype)
        scores = dot(q, k, tl.zeros((q.shape[0], KEYS), tl.float32))
    if MASKED:
        seen = (key[None, :] <= position[:, None]) & exists[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak  # a row that sees no key has 0s
    weights = tl.exp2(tl.fma(scores, scale, -(shift * scale)[:, None]))
    rescale = tl.exp2((peak - shift) * scale)
    total = tl.fma(total, rescale, tl.sum(weights, 1))
    if not TAIL:
        v = load(v_ptr + (slot * v_token)[:, None] + column[None, :], exists[:, None], MASKED).to(q.dtype)
    out = dot(cast(weights, tl.bfloat16), v, out * rescale[:, None])
    return new_peak, total, out
