"""Compares the same answers, asked for in two ways, bit for bit."""

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
    """The point at which two answers to one prompt part: the earliest position of all prompts."""

    prompt: int
    """Its number."""
    position: int
    """Of the token in the answer, from 0."""
    tokens: list[int | str]
    """Of the first way and of the second."""
    logprobs: list[float | None]
    """Likewise, of this token or one beside it; None: not finite."""


@dataclass(frozen=True)
class Comparison:
    """Two ways to ask for the same answers.

    A token's log-probabilities are its own and those of the most probable ones beside it; the one that is furthest
    apart speaks for it.
    """

    answers: int
    tokens: int
    """Compared ones: behind the first token that is another one, nothing is."""
    differing: int
    """Tokens that are other ones, or whose log-probabilities are."""
    other_tokens: int
    """Those that are other ones."""
    first: FirstDifference | None
    size: Difference
    """Of the log-probabilities of equal tokens."""

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
    earliest = min(parted, key=lambda each: (each.position, each.prompt), default=None)
    return Comparison(len(first), tokens, differing, others, earliest, difference(pairs))


def difference(pairs: Sequence[tuple[float, float]]) -> Difference:
    """Do as `measure.difference` does with tensors, on a machine that may have no torch. Two NaNs are left out."""
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
