"""Chooses the problems of a step from seed and number alone, so that a resumed run goes on where it was.

Each source is shuffled again for each of its epochs. Several sources divide the unit interval in proportion to their
weights. Prompt n comes from the source whose part has the point u + n * golden ratio (mod 1), with u from the seed.
Such points are spread so evenly (Weyl 1916) that any stretch of prompts has the sources in nearly their proportions.
"""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fp8rl.rl.experiment import Experiment
from fp8rl.rollout.tasks.data import load_problems
from fp8rl.rollout.types import Problem, Prompt, prompt_ids

T = TypeVar("T")

_UNIT = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
"""The golden ratio's fraction, in 2^-64."""


def training_problems(experiment: Experiment) -> Stream[Problem]:
    """The problems of `data.train` in the order of the run. Raises `UserError` if they cannot be read."""
    sources = experiment.data.training
    return Stream(
        [load_problems(source) for source in sources],
        [own.weight for own in experiment.data.train],
        experiment.run.seed,
    )


def to_prompts(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> list[Prompt]:
    """Return each problem with its question's tokens, rendered by the tokenizer's chat template."""
    return [Prompt(problem, prompt_ids(tokenizer, problem)) for problem in problems]


class Stream(Generic[T]):
    """Items of one or more sources without end. Every item of a source is seen once before any is seen again."""

    def __init__(self, sources: Sequence[Sequence[T]], weights: Sequence[float], seed: int) -> None:
        self._sources = sources
        self._orders = [_orders(len(items), index, seed) for index, items in enumerate(sources)]
        total = sum(weights)
        self._ends = [*(round(end / total * _UNIT) for end in accumulate(weights[:-1])), _UNIT]
        self._offset = int.from_bytes(hashlib.blake2b(f"sources:{seed}".encode(), digest_size=8).digest())

    def nth(self, number: int) -> T:
        """Item `number`, from 0."""
        source, place = self.place(number)
        items = self._sources[source]
        epoch, at = divmod(place, len(items))
        return items[int(self._orders[source](epoch)[at])]

    def of_step(self, step: int, count: int) -> list[T]:
        """The items of `step`, from 1, if each step takes `count`."""
        return [self.nth(number) for number in range((step - 1) * count, step * count)]

    def place(self, number: int) -> tuple[int, int]:
        """Return which source item `number` comes from, and how many came from it before."""
        if len(self._sources) == 1:
            return 0, number
        source = bisect_right(self._ends, (self._offset + number * _GOLDEN) % _UNIT)
        below = self._ends[source - 1] if source else 0
        return source, self._points_below(self._ends[source], number) - self._points_below(below, number)

    def _points_below(self, end: int, count: int) -> int:
        """Return how many of the first `count` points lie below `end`: [x mod 1 < e] is floor(x) - floor(x - e)."""
        u = self._offset
        return count + _floor_sum(count, _UNIT, _GOLDEN, u) - _floor_sum(count, _UNIT, _GOLDEN, u + _UNIT - end)


def _orders(count: int, source: int, seed: int) -> Callable[[int], Tensor]:
    """The order of a source's items in an epoch: int64 [count]."""

    @functools.lru_cache(maxsize=2)
    def of_epoch(epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed((seed + (source << 31)) * 1_000_003 + epoch)
        return torch.randperm(count, generator=generator)

    return of_epoch


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """The sum of floor((a * i + b) / m) for i from 0 to n - 1, in Euclid's way (Graham, Knuth and Patashnik, 3.5)."""
    total = 0
    while n > 0:
        total += (a // m) * (n * (n - 1) // 2) + (b // m) * n
        a, b = a % m, b % m
        top = a * n + b
        n, b = divmod(top, m)
        m, a = a, m
    return total
