"""Defines the seeds of sampled tokens.

Every answer has a seed. The token after position p is drawn with noise that depends on (seed, p, token id), see
`numerics.ops.draw`. So an answer is the same alone or in a batch, on any engine, and after a retraction, a retry or a
restart. A process that has the logits, such as the trainer in exact mode, can draw the tokens again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

GREEDY = -1
"""The value in place of a seed with which the most probable token is taken."""


@dataclass(frozen=True)
class Truncation:
    """The limits of top-p, top-k and min-p on the tokens that may be drawn (`numerics.ops.truncation_floors`)."""

    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @property
    def cuts(self) -> bool:
        """True if one of the limits may leave a token out."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


EVERY_TOKEN = Truncation()


def answer_seed(run_seed: int, step: int, prompt: int, answer: int) -> int:
    """Return the seed of an answer, 0 to 2^62 - 1.

    step: the step that first asked for the answer. prompt: the number of its prompt in that step. answer: its place
    among the answers to this prompt.
    """
    return _hash62(f"{run_seed}:{step}:{prompt}:{answer}")


def evaluation_seed(run_seed: int, name: str, problem: int, answer: int) -> int:
    """Return the seed of an answer to a held-out problem, 2^62 to 2^63 - 1. Training has no seeds in this range.

    name: the evaluation set. problem: its number in the set. answer: its place among the answers to this problem.
    """
    return 1 << 62 | _hash62(f"{run_seed}:{name}:{problem}:{answer}")


def canary_seed(run_seed: int) -> int:
    """Return the seed of an answer that is known before it is sampled, below `GREEDY`.

    Tokens with such seeds are drawn at an infinite temperature, so that the noise alone chooses them, and not the
    logits.
    """
    return GREEDY - 1 - _hash62(f"{run_seed}:canary")


def branch_seed(seed: int, prompt_ids: Sequence[int], same: int) -> int:
    """Return the seed of a further row of a conversation whose first row has `seed`.

    prompt_ids: the row's prompt. same: the number of earlier rows with the same prompt. The seed is in the range of
    `seed`, for training or evaluation. A greedy conversation stays greedy.
    """
    if seed == GREEDY:
        return GREEDY
    return seed & 1 << 62 | _hash62(f"{seed}:{list(prompt_ids)}:{same}")


def _hash62(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2


# Pseudo-random bits as a function of what they are for, without a state: the same wherever they are needed again.

GOLDEN = -0x61C8864680B583EB
"""2^64 / golden ratio, as int64: its multiples are far apart."""
MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""The factors of splitmix64 (Steele, Lea and Flood 2014)."""


def mix(x: Tensor) -> Tensor:
    """Compute splitmix64's finalizer, a bijection of int64 in which each bit depends on every bit; products wrap."""
    x = (x ^ shifted(x, 30)) * MIX[0]
    x = (x ^ shifted(x, 27)) * MIX[1]
    return x ^ shifted(x, 31)


def shifted(x: Tensor, bits: int) -> Tensor:
    """Compute int64 x >> bits with zeros shifted in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
