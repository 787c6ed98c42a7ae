"""The draw of a token as a function of its logits and of what is sampled, and of nothing else.

Every answer has a seed, and the token that follows position p of it is drawn with the noise that belongs to (seed, p,
token id). So an answer comes out the same alone or in a batch, on any engine, after a retraction, a retry or a restart,
and whoever has the logits, such as the trainer in exact mode, can draw its tokens again.

By Gumbel's maximum: argmax(logits / temperature + noise) over the vocabulary is a draw from the softmax (Gumbel 1954).
It needs no sum, so there is no order of reduction to define, and the same code serves every device.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from numerics.hashing import GOLDEN, mix, shifted

GREEDY = -1
"""In place of a seed: the most probable token is taken."""

_BLOCK = 1 << 18  # logits at a time: more fall out of a CPU's caches


def answer_seed(run_seed: int, step: int, prompt: int, answer: int) -> int:
    """The seed of an answer, 0 to 2^62 - 1.

    step: that the answer was first asked for. prompt: the number of its prompt in that step. answer: its place among
    the answers to this prompt.
    """
    return _hash62(f"{run_seed}:{step}:{prompt}:{answer}")


def evaluation_seed(run_seed: int, name: str, problem: int, answer: int) -> int:
    """The seed of an answer to a held-out problem, 2^62 to 2^63 - 1, where none of training is.

    name: of the set. problem: its number in it. answer: its place among the answers to this problem.
    """
    return 1 << 62 | _hash62(f"{run_seed}:{name}:{problem}:{answer}")


def draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One token of each row of logits [B, V], int64 [B]; a NaN is never drawn.

    temperatures: float [B]. seeds: int64 [B], `GREEDY` or more. positions: int64 [B], of the last token that the row
    has seen, counted from 0 at the prompt's first.

    The quotient is in FP32, as in `ops.token_logprobs`, the noise in FP64: in FP32 two tokens of a large vocabulary
    would often be equal. Ties go to the lower id.
    """
    rows = max(1, _BLOCK // logits.shape[-1])
    pieces = (values.split(rows) for values in (logits, temperatures, seeds, positions))
    return torch.cat([_draw(*piece) for piece in zip(*pieces, strict=True)])


def gumbel(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """The noise of tokens 0 to count - 1, FP64 [B, count]; seeds and positions: int64 [B]."""
    row = mix(mix(seeds + GOLDEN) ^ mix(positions * GOLDEN + 1))
    column = torch.arange(1, count + 1, device=seeds.device) * GOLDEN
    bits = mix(row.unsqueeze(-1) + column)
    uniform = (shifted(bits, 12).double() + 0.5) * 2.0**-52  # never 0 nor 1
    return -(-uniform.log()).log()


def _draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    scaled = (logits.float() / temperatures.float().unsqueeze(-1)).double().nan_to_num(nan=-torch.inf)
    noisy = scaled + gumbel(seeds, positions, logits.shape[-1])
    return torch.where((seeds == GREEDY).unsqueeze(-1), scaled, noisy).argmax(-1)


def _hash62(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2
