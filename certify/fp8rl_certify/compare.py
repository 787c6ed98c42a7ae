"""Compares answers to the same prompts that were asked for in two ways, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fp8rl_certify.api import Answer
from fp8rl_certify.report import Difference

_MAX_EXPONENT = 20.0
"""The bound of `mismatch/k3_kl` in fp8rl."""


@dataclass(frozen=True)
class FirstDifference:
    """The earliest position at which two answers to the same prompt differ, over all prompts."""

    prompt: int
    """Number of the prompt."""
    position: int
    """Position of the token in the answer, from 0."""
    tokens: list[int | str]
    """The token of the first way, and the token of the second way."""
    logprobs: list[float | None]
    """The pair of log-probabilities that differs most, of this token or a most probable token; None: not finite."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of two ways to ask for the same answers.

    A token has its own log-probability, and log-probabilities of the most probable tokens at its place. Of all these
    the pair that differs most counts.
    """

    answers: int
    tokens: int
    """Number of compared tokens. After the first different token of an answer nothing is compared."""
    differing: int
    """Number of tokens that differ by id or by a log-probability."""
    other_tokens: int
    """Number of tokens that differ by id."""
    first: FirstDifference | None
    size: Difference
    """The difference of the log-probabilities of tokens with equal ids."""

    @property
    def equal(self) -> bool:
        return self.differing == 0


def compare(first: Sequence[Answer], second: Sequence[Answer]) -> Comparison:
    """Compare two lists of answers to the same prompts, in the same order. A NaN equals a NaN."""
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
    earliest = min(parted, key=lambda each: (each.position, each.prompt), default=None)
    return Comparison(len(first), tokens, differing, others, earliest, difference(pairs))


def difference(pairs: Sequence[tuple[float, float]]) -> Difference:
    """Compute what `measure.difference` computes from tensors, without torch. A pair of two NaNs is left out."""
    known = [x - y for x, y in pairs if not (math.isnan(x) and math.isnan(y))]
    d = [each for each in known if math.isfinite(each)]
    if not d:
        return Difference(0, len(known), None, None, None, None)
    sizes = sorted(map(abs, d))
    p50, p99 = (sizes[-(-percent * len(d) // 100) - 1] for percent in (50, 99))
    exponents = [max(-_MAX_EXPONENT, min(_MAX_EXPONENT, each)) for each in d]
    return Difference(
        tokens=len(d),
        nonfinite=len(known) - len(d),
        mean=fmean(sizes),
        p99=p99,
        max=sizes[-1],
        exact_frac=sum(each == 0 for each in d) / len(d),
        p50=p50,
        k3_kl=fmean(math.expm1(exponent) - each for exponent, each in zip(exponents, d, strict=True)),
    )


def _said(answer: Answer, position: int) -> tuple[int | str, list[float]]:
    """Return a token and a list: its log-probability, then the log-probabilities of the most probable tokens."""
    others = answer.others[position] if position < len(answer.others) else ()
    return answer.tokens[position], [answer.logprobs[position], *others]


def _same(x: float, y: float) -> bool:
    return x == y or (x != x and y != y)


def _distance(pair: tuple[float, float]) -> float:
    """Return the distance of two numbers: 0 for two NaNs or equal numbers, otherwise infinite if one is not finite."""
    x, y = pair
    if _same(x, y):
        return 0.0
    return abs(x - y) if math.isfinite(x - y) else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
