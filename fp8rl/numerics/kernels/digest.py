"""Computes the sums of tensor digests (`numerics.digest.chunk_sums`), for all tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.backend.dispatch import OPS
from fp8rl.numerics.core.memory import numbered
from fp8rl.numerics.digest import CHUNK, odd_weights

# A program takes several chunks side by side, so that one load of the weights, which are four times as long as the
# words, serves all of them.
_CHUNKS, _WORDS = 8, 512


def chunk_sums(words: Sequence[Tensor]) -> Tensor:
    """`numerics.digest.chunk_sums` of int32 stacks on one device."""
    device = words[0].device
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        return OPS["chunk_sums"](words)  # no kernel reads them; the sums are the same
    table = [(stack.data_ptr(), 4 * stack.stride(0), len(stack), stack.shape[1]) for stack in words]
    first, step, count, length = torch.tensor(table).t()
    of_tensor = (length + CHUNK - 1) // CHUNK
    stack_of, number = numbered(count * of_tensor)
    total = len(stack_of)
    sums = torch.empty(2, total, dtype=torch.int64, device=device)
    if not total:
        return sums
    tensor, chunk = number // of_tensor[stack_of], number % of_tensor[stack_of]
    addresses = first[stack_of] + tensor * step[stack_of] + 4 * CHUNK * chunk
    left = (length[stack_of] - CHUNK * chunk).clamp(max=CHUNK)
    aligned = not ((addresses % 16).any() or (left % 4).any())
    _kernel[(-(-total // _CHUNKS),)](
        *(torch.stack((addresses, left)).to(device, non_blocking=True), odd_weights(device), sums, total),
        ALIGNED=aligned,
        LENGTH=CHUNK,
        CHUNKS=_CHUNKS,
        WORDS=_WORDS,
        num_warps=8,
    )
    return sums


@triton.jit(do_not_specialize=["total"])
def _kernel(
    table_ptr, weights_ptr, sums_ptr, total,
    ALIGNED: tl.constexpr, LENGTH: tl.constexpr, CHUNKS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    address = tl.load(table_ptr + chunk, mask=chunk < total, other=0).to(tl.pointer_type(tl.int32))
    left = tl.load(table_ptr + total + chunk, mask=chunk < total, other=0)
    if ALIGNED:
        address, left = tl.multiple_of(address, 16), tl.multiple_of(left, 4)
    first = tl.zeros((CHUNKS, WORDS), tl.int64)
    second = tl.zeros((CHUNKS, WORDS), tl.int64)
    for start in range(0, LENGTH, WORDS):
        word = start + tl.arange(0, WORDS)
        values = tl.load(address[:, None] + word[None, :], mask=word[None, :] < left[:, None], other=0).to(tl.int64)
        first += values * tl.load(weights_ptr + word)[None, :]
        second += values * tl.load(weights_ptr + LENGTH + word)[None, :]
    tl.store(sums_ptr + chunk, tl.sum(first, 1), mask=chunk < total)
    tl.store(sums_ptr + total + chunk, tl.sum(second, 1), mask=chunk < total)
