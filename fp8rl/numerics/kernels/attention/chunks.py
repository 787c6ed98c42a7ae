"""Merges chunks of keys in order: in the program that computed them, or in a second kernel if several programs did.

If few rows attend to many keys, as in decode, chunks are spread over programs (Flash-Decoding, Dao et al. 2023). Each
program stores its part in FP32. The second kernel merges a row's parts in the same order, by the same formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import cast
from fp8rl.numerics.ops.attention import KEY_CHUNK

# Sequences that are end to end: which one a program works on, and where a token stands in its own.


def positions_of(lengths: Tensor, tokens: int) -> Tensor:
    """Return int64 [tokens], the positions in sequences of these lengths. It does not wait for the device."""
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths, output_size=tokens)
    return torch.arange(tokens, device=lengths.device) - starts


@triton.jit
def _new_tokens(new_ptr, index, sequences):
    """The number of new tokens of each sequence; without a pointer it is 1."""
    if new_ptr is None:
        return (index < sequences).to(tl.int32)
    else:
        return tl.load(new_ptr + index, mask=index < sequences, other=0).to(tl.int32)


@triton.jit
def find_sequence(new_ptr, sequences, SEQUENCES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return this program's sequence (`sequences`: none) and tile, and the sequence's first token and new tokens."""
    index = tl.arange(0, SEQUENCES)
    new = _new_tokens(new_ptr, index, sequences)
    tiles = tl.cdiv(new * GROUP, ROWS)
    before = tl.cumsum(tiles, 0) <= tl.program_id(0)
    sequence = tl.sum(before.to(tl.int32), 0)
    own = index == sequence
    tile = tl.program_id(0) - tl.sum(tl.where(before, tiles, 0), 0)
    longest_first = tl.sum(tl.where(own, tiles, 0), 0) - 1 - tile
    return sequence, longest_first, tl.sum(tl.where(before, new, 0), 0), tl.sum(tl.where(own, new, 0), 0)


@triton.jit
def key_slots(table_ptr, start, keys, table_column, PAGED: tl.constexpr, KEYS: tl.constexpr):
    """Offsets of the keys from `start` on: from the table if keys are in slots."""
    key = start + tl.arange(0, KEYS)
    return tl.load(table_ptr + key * table_column, mask=key < keys, other=0) if PAGED else key


PART_BYTES = 256 << 20
"""The most bytes that parts may take. Rows that would need more are enough to fill a GPU by themselves."""
PROGRAMS = 528
"""The number of programs to aim for: four for each of the 132 SMs of an H100 or H200."""
_ROWS = 4  # of a program that merges
_SEQUENCES = 256  # among which it finds its own, at least: one compiled kernel for most batches


@dataclass(frozen=True)
class Parts:
    """The partial results of the chunks of keys for each row of the queries, before they are merged."""

    outs: Tensor
    """Sums of weighted values, FP32 [chunks, kv heads, tokens, heads of a kv head, D], rows in the order of tiles."""
    peaks: Tensor
    """Largest scores, FP32 [chunks, kv heads, tokens, heads of a kv head]."""
    totals: Tensor
    """Sums of weights, in the shape of `peaks`."""
    programs: int
    """The number of programs that share the chunks of a tile."""


def parts_of(out: Tensor, key_heads: int, longest: int, tiles: int) -> Parts | None:
    """Allocate the parts of out [tokens, heads, D] over up to `longest` keys. Return None if one program is to take all
    chunks of a tile. Only shapes decide. tiles: the number of tiles of all heads."""
    tokens, heads, dim = out.shape
    chunks = -(-longest // KEY_CHUNK)
    programs = min(chunks, -(-PROGRAMS // tiles))
    if programs <= 1 or 4 * tokens * heads * chunks * (dim + 2) > PART_BYTES:
        return None
    shape = (chunks, key_heads, tokens, heads // key_heads)
    outs = torch.empty(*shape, dim, dtype=torch.float32, device=out.device)
    peaks, totals = torch.empty(2, *shape, dtype=torch.float32, device=out.device)
    return Parts(outs, peaks, totals, programs)


def merge_parts(parts: Parts, out: Tensor, new: Tensor | None, lengths: Tensor, scale: float) -> None:
    """Merge the parts of `paged_attention` into out BF16 [tokens, heads, D]; tokens of no sequence are left alone."""
    tokens, heads, dim = out.shape
    sequences = len(lengths)
    _merge_kernel[tokens, -(-heads // _ROWS)](
        *(parts.outs, parts.peaks, parts.totals, out, new, lengths, sequences, tokens, heads, scale),
        GROUP=parts.outs.shape[3],
        SEQUENCES=max(_SEQUENCES, triton.next_power_of_2(sequences)),
        ROWS=_ROWS,
        CHUNK=KEY_CHUNK,
        D=dim,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["sequences", "tokens"])
def _merge_kernel(
    outs_ptr, peaks_ptr, totals_ptr, out_ptr, new_ptr, lengths_ptr, sequences, tokens, heads, scale,
    GROUP: tl.constexpr, SEQUENCES: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    index = tl.arange(0, SEQUENCES)
    new = _new_tokens(new_ptr, index, sequences)
    sequence = tl.sum((tl.cumsum(new, 0) <= token).to(tl.int32), 0)
    if sequence >= sequences:
        return
    keys = tl.load(lengths_ptr + sequence).to(tl.int32)
    position = keys - tl.sum(tl.where(index <= sequence, new, 0), 0) + token
    head, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    stored = head < heads
    head = tl.minimum(head, heads - 1)

    peak, total, out = no_keys(ROWS, D)
    for chunk in range(tl.cdiv(position + 1, CHUNK)):
        part = ((chunk * (heads // GROUP) + head // GROUP) * tokens + token) * GROUP + head % GROUP
        part_peak, part_total = tl.load(peaks_ptr + part), tl.load(totals_ptr + part)
        part_out = tl.load(outs_ptr + part[:, None] * D + column[None, :])
        peak, total, out = merge_chunk(peak, total, out, part_peak, part_total, part_out, scale)
    result = cast(divided(out, total)[0], tl.bfloat16)
    row = (token * heads + head)[:, None]
    tl.store(out_ptr + row * D + column[None, :], result, mask=stored[:, None])


@triton.jit
def no_keys(ROWS: tl.constexpr, D: tl.constexpr):
    """Peak, total and out [ROWS, D] of rows that have seen no key yet."""
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    return peak, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, D), tl.float32)


@triton.jit
def merge_chunk(peak, total, out, chunk_peak, chunk_total, chunk_out, scale):
    """Add a chunk to the chunks before it. One of the two peaks is finite, because every row sees key 0, in chunk 0."""
    new_peak = tl.maximum(peak, chunk_peak)
    rescale, share = tl.exp2((peak - new_peak) * scale), tl.exp2((chunk_peak - new_peak) * scale)
    total = tl.fma(total, rescale, chunk_total * share)
    return new_peak, total, tl.fma(out, rescale[:, None], chunk_out * share[:, None])


@triton.jit
def divided(out, total):
    """Return out / total, and total. A sequence without keys, as in a padded CUDA graph, gives zeros."""
    total = tl.where(total == 0.0, 1.0, total)
    return out / total[:, None], total
