"""Digests of tensors: the proof that two processes hold the same bytes.

A 128-bit multilinear hash (Carter and Wegman; Lemire and Kaser, "Strongly universal string hashing is fast"): the
tensor's bytes are read as 32-bit words, each word is multiplied with an odd pseudo-random 64-bit weight of its
position, and the products are added modulo 2^64, with two independent sets of weights. Integer sums do not depend on
the order of addition, so a CPU and a GPU agree. Any single changed word changes the digest with certainty, any other
fault escapes with a probability below 2^-64. It detects faults; it is no defence against an adversary.
"""

from __future__ import annotations

import functools
import hashlib

import torch

from numerics.compiler import compilable

_CHUNK = 1 << 18  # words that one table of weights covers: 1 MiB of data


def tensor_digest(tensor: torch.Tensor) -> str:
    """32 hex digits over dtype, shape and bytes of a tensor of any dtype on any device."""
    words = _as_words(tensor)
    weights = _odd_weights(_CHUNK, words.device)
    chunks = [_weighted_sums(chunk, weights[:, : chunk.numel()]) for chunk in words.split(_CHUNK)]
    # Each chunk has a weight of its own, so that two chunks which changed places are seen.
    totals = (torch.stack(chunks, 1) * _odd_weights(len(chunks), words.device)).sum(1)
    text = f"{tensor.dtype}|{tuple(tensor.shape)}|{totals.tolist()}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@compilable
def _weighted_sums(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (words.long() * weights).sum(1)


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    aligned = data.storage_offset() % 4 == 0 and data.data_ptr() % 4 == 0
    if data.numel() % 4 or not aligned:
        padded = data.new_zeros(-(-data.numel() // 4) * 4)
        padded[: data.numel()] = data
        data = padded
    return data.view(torch.int32)


@functools.lru_cache(maxsize=64)
def _odd_weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd int64 weights [2, count], the same on every machine: splitmix64 of a counter (Steele, Lea and Flood)."""
    x = torch.arange(1, 2 * count + 1, dtype=torch.int64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _logical_shift(x, shift)) * (factor - 2**64)
    return (x ^ _logical_shift(x, 31) | 1).reshape(2, count).to(device)


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
