"""Sequences that lie end to end: which one a program works on, and where a token stands in its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def positions_of(lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    """int64 [tokens], of sequences of these lengths. It does not wait for the device."""
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths, output_size=tokens)
    return torch.arange(tokens, device=lengths.device) - starts


@triton.jit
def find_sequence(new_ptr, sequences, SEQUENCES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The sequence of this program (`sequences` if it has none), its tile in it, its first token, its new tokens."""
    index = tl.arange(0, SEQUENCES)
    new = tl.load(new_ptr + index, mask=index < sequences, other=0).to(tl.int32)
    tiles = tl.cdiv(new * GROUP, ROWS)
    before = tl.cumsum(tiles, 0) <= tl.program_id(0)
    sequence = tl.sum(before.to(tl.int32), 0)
    own = index == sequence
    tile = tl.program_id(0) - tl.sum(tl.where(before, tiles, 0), 0)
    longest_first = tl.sum(tl.where(own, tiles, 0), 0) - 1 - tile
    return sequence, longest_first, tl.sum(tl.where(before, new, 0), 0), tl.sum(tl.where(own, new, 0), 0)
