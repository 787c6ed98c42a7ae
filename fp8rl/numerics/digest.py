"""Digests tensors, to prove that two processes hold the same bytes.

The digest is a 128-bit multilinear hash (Carter and Wegman; Lemire and Kaser, "Strongly universal string hashing is
fast"). It reads the tensor's bytes as 32-bit words and takes the sum of word_i * weight_i modulo 2^64, with two
independent sets of odd pseudo-random 64-bit weights. Integer sums do not depend on the order of addition, so a CPU and
a GPU agree. One changed word always changes the digest; any other fault escapes with a probability below 2^-64. The
digest detects faults; it is no defence against an adversary.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8rl.numerics.backend.dispatch import op
from fp8rl.numerics.core.memory import alike
from fp8rl.numerics.sampling import mix

CHUNK = 1 << 14
"""Words that share one table of weights: 64 KiB of data, and a table that fits into a cache."""
_OF_CHUNKS = 1 << 40  # where the counter of the chunks' weights starts, far from the words' counter


def tensor_digest(tensor: Tensor) -> str:
    """Return 32 hex digits over dtype, shape and bytes of a tensor of any dtype on any device."""
    return tensor_digests([tensor])[0]


def tensor_digests(tensors: Sequence[Tensor]) -> list[str]:
    """Return the `tensor_digest` of each tensor, in one pass over all and with one wait for the device."""
    if not tensors:
        return []
    words = [_as_words(tensor) for tensor in tensors]
    counts = torch.tensor([-(-its_words.numel() // CHUNK) for its_words in words])
    tensor_of = torch.arange(len(counts)).repeat_interleave(counts)
    # Each chunk has a weight of its own, so that two swapped chunks change the sums.
    within = torch.arange(len(tensor_of)) - (counts.cumsum(0) - counts)[tensor_of]
    weighted = chunk_sums(words).cpu() * _odd(_OF_CHUNKS + torch.stack((within, within + counts[tensor_of])))
    sums = weighted.new_zeros(2, len(counts)).index_add_(1, tensor_of, weighted).t().tolist()
    texts = [f"{tensor.dtype}|{tuple(tensor.shape)}|{both}" for tensor, both in zip(tensors, sums, strict=True)]
    return [hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in texts]


@op
def chunk_sums(words: Sequence[Tensor]) -> Tensor:
    """Return the sum of word * weight over every chunk of every tensor, int64 [2, chunks of all tensors].

    words: int32 [n] each, in chunks of CHUNK words; the last chunk is shorter. Both sets of weights begin again in each
    chunk.
    """
    chunks = [chunk for tensor in words for chunk in tensor.split(CHUNK) if len(chunk)]
    weights = odd_weights(words[0].device)
    sums = weights.new_empty(2, len(chunks))
    for places, stack in alike(chunks):
        wide = stack.long()
        sums[:, places] = torch.stack([(wide * some).sum(1) for some in weights[:, : wide.shape[1]]])
    return sums


def _as_words(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    size = flat.nbytes
    if size % 4 or flat.data_ptr() % 4 or flat.storage_offset() * flat.itemsize % 4:
        padded = flat.new_zeros(-(-size // 4) * 4, dtype=torch.uint8)
        padded[:size] = flat.view(torch.uint8)
        flat = padded
    return flat.view(torch.int32)


@functools.cache
def odd_weights(device: torch.device) -> Tensor:
    """Return both sets of weights of a chunk's words, int64 [2, CHUNK]."""
    return _odd(torch.arange(1, 1 + 2 * CHUNK).reshape(2, CHUNK)).to(device)


def _odd(counters: Tensor) -> Tensor:
    """Return pseudo-random odd numbers, equal on every machine: splitmix64 of int64 counters."""
    return mix(counters) | 1
