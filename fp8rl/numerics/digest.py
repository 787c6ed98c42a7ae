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
import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.numerics.backend.dispatch import op
from fp8rl.numerics.core.memory import numbered
from fp8rl.numerics.sampling import mix

CHUNK = 1 << 14
"""Words that share one table of weights: 64 KiB of data, and a table that fits into a cache."""
_AT_ONCE = 8 * CHUNK  # words that a CPU's cache holds with their products
_OF_CHUNKS = 1 << 40  # where the counter of the chunks' weights starts, far from the words' counter


def tensor_digest(tensor: Tensor) -> str:
    """Return 32 hex digits over dtype, shape and bytes of a tensor of any dtype on any device."""
    return tensor_digests([tensor])[0]


def tensor_digests(tensors: Sequence[Tensor]) -> list[str]:
    """Return the `tensor_digest` of each tensor, in one pass over all and with one wait for the device."""
    return stack_digests([tensor[None] for tensor in tensors])


def stack_digests(stacks: Sequence[Tensor]) -> list[str]:
    """Return the `tensor_digest` of each tensor of each stack [n, ...], in their order, as `tensor_digests` does."""
    if not stacks:
        return []
    words = [_as_words(stack) for stack in stacks]
    sizes = torch.tensor([[len(of_stack), -(-of_stack.shape[1] // CHUNK)] for of_stack in words])
    counts = sizes[:, 1].repeat_interleave(sizes[:, 0])
    # Each chunk has a weight of its own, so that two swapped chunks change the sums.
    tensor_of, within = numbered(counts)
    weighted = chunk_sums(words).cpu() * _odd(_OF_CHUNKS + torch.stack((within, within + counts[tensor_of])))
    sums = zip(*weighted.new_zeros(2, len(counts)).index_add_(1, tensor_of, weighted).tolist(), strict=True)
    kinds = [(f"{stack.dtype}|{tuple(stack.shape[1:])}|", len(stack)) for stack in stacks]
    texts = [f"{kind}[{a}, {b}]" for kind, count in kinds for a, b in itertools.islice(sums, count)]
    return [hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in texts]


@op
def chunk_sums(words: Sequence[Tensor]) -> Tensor:
    """Return the sum of word * weight over every chunk of every tensor, int64 [2, chunks of all tensors].

    words: stacks of tensors, int32 [n, words] each. A tensor's words are in chunks of CHUNK; the last chunk is shorter.
    Both sets of weights begin again in each chunk.
    """
    weights = odd_weights(words[0].device)
    sums = [weights.new_empty(2, 0)]
    for tensors in (some for stack in words for some in stack.split(max(1, _AT_ONCE // max(1, stack.shape[1])))):
        of_pieces = []
        for piece in tensors.split(_AT_ONCE, 1) if tensors.numel() else ():
            length = min(CHUNK, piece.shape[1])
            whole = F.pad(piece, (0, -piece.shape[1] % length)) if piece.shape[1] % length else piece
            wide = whole.unflatten(1, (-1, length)).long()
            of_pieces.append(torch.stack([(wide * some).sum(2) for some in weights[:, :length]]))
        sums += [torch.cat(of_pieces, 2).flatten(1)] if of_pieces else []
    return torch.cat(sums, 1)


def _as_words(stack: Tensor) -> Tensor:
    """Return the bytes of the tensors in a stack as int32 [n, words], filled up with zeros."""
    flat = stack.detach().unsqueeze(-1).flatten(1)
    size = flat.shape[1] * flat.itemsize
    steps = (size, flat.data_ptr(), flat.storage_offset() * flat.itemsize, flat.stride(0) * flat.itemsize)
    if size and flat.stride(1) == 1 and not any(step % 4 for step in steps):
        return flat.view(torch.int32)
    words = flat.new_zeros(len(flat), -(-size // 4), dtype=torch.int32)
    words.view(torch.uint8)[:, :size] = flat.contiguous().view(torch.uint8)
    return words


@functools.cache
def odd_weights(device: torch.device) -> Tensor:
    """Return both sets of weights of a chunk's words, int64 [2, CHUNK]."""
    return _odd(torch.arange(1, 1 + 2 * CHUNK).reshape(2, CHUNK)).to(device)


def _odd(counters: Tensor) -> Tensor:
    """Return pseudo-random odd numbers, equal on every machine: splitmix64 of int64 counters."""
    return mix(counters) | 1
