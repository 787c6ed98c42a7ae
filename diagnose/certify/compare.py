"""The same answers, asked for in two ways: what of them is equal, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8rl.diagnose.certify.api import Answer
from fp8rl.diagnose.difference import Difference, difference


@dataclass(frozen=True)
class FirstDifference:
    """The point at which two answers to one prompt part: the earliest position of all prompts.

    prompt: its number. position: of the token in the answer, from 0. tokens, logprobs: of the first way and of the
    second, of this token or one beside it; a log-probability that is not finite is None.
    """

    prompt: int
    position: int
    tokens: list[int | str]
    logprobs: list[float | None]


@dataclass(frozen=True)
class Comparison:
    """Two ways to ask for the same answers.

    A token's log-probabilities are its own and those of the most probable ones beside it; the one that is furthest
    apart speaks for it.

    answers: compared. tokens: compared; behind the first token that is another one, nothing is. differing: tokens that
    are other ones, or whose log-probabilities are. other_tokens: those that are other ones. size: of the
    log-probabilities of equal tokens.
    """

    answers: int
    tokens: int
    differing: int
    other_tokens: int
    first: FirstDifference | None
    size: Difference

    @property
    def equal(self) -> bool:
        return self.differing == 0


def compare(first: Sequence[Answer], second: Sequence[Answer]) -> Comparison:
    """Answers to the same prompts in the same order. A NaN equals a NaN."""
    parted: list[FirstDifference] = []
    pairs: list[tuple[float, float]] = []
    tokens = differing = others = 0
    for prompt, (one, other) in enumerate(zip(first, second, strict=True)):
        for position in range(max(len(one.tokens), len(other.tokens))):
            if position >= min(len(one.tokens), len(other.tokens)):  # one has ended
                differing += 1
                parted.append(FirstDifference(prompt, position, [], []))
                break
            tokens += 1
            (a, values), (b, again) = _said(one, position), _said(other, position)
            if a == b:
                pairs.append(max(zip(values, again), key=_distance))
            if a != b or not all(_same(x, y) for x, y in zip(values, again)):
                differing += 1
                x, y = (values[0], again[0]) if a != b else pairs[-1]
                parted.append(FirstDifference(prompt, position, [a, b], [_finite(x), _finite(y)]))
            if a != b:
                others += 1
                break
    both = torch.tensor(pairs, dtype=torch.float64).reshape(1, -1, 2)
    size = difference(both[..., 0], both[..., 1], ~both.isnan().all(2))
    earliest = min(parted, key=lambda each: (each.position, each.prompt), default=None)
    return Comparison(len(first), tokens, differing, others, earliest, size)


def _said(answer: Answer, position: int) -> tuple[int | str, list[float]]:
    """A token, and its log-probability before those of the most probable ones."""
    others = answer.others[position] if position < len(answer.others) else ()
    return answer.tokens[position], [answer.logprobs[position], *others]


def _same(x: float, y: float) -> bool:
    return x == y or (x != x and y != y)


def _distance(pair: tuple[float, float]) -> float:
    """Return the distance of two numbers; those of which one is not finite are furthest."""
    x, y = pair
    if _same(x, y):
        return 0.0
    return abs(x - y) if math.isfinite(x - y) else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
