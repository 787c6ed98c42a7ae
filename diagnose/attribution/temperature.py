"""Finds the temperature at which tokens were sampled."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.numerics import ops

LOWEST, HIGHEST, GRID = 0.05, 10.0, 48
"""The search begins with GRID temperatures from LOWEST to HIGHEST, in equal ratios."""

_GOLDEN = (math.sqrt(5) - 1) / 2
_STEPS = 40
"""Golden-section steps: they shrink the bracket by 2e8, below FP32's resolution."""


@dataclass(frozen=True)
class TemperatureFit:
    """The temperature that explains recorded log-probabilities best.

    temperature: of the best fit. abs_diff_mean: mean |d| that remains at it.
    """

    temperature: float
    abs_diff_mean: float


def fit_temperature(logits: Tensor, tokens: Tensor, recorded: Tensor) -> TemperatureFit:
    """The temperature at which log_softmax(logits / temperature) is nearest to the recorded log-probabilities.

    Nearest in mean absolute difference, over tokens whose recorded value is finite. People write temperatures with few
    digits: a value with fewer that fits as well is preferred.

    Args:
        logits: float [N, V], before any temperature.
        tokens: int64 [N].
        recorded: float [N].
    """
    finite = recorded.isfinite()
    logits, tokens, recorded = logits[finite], tokens[finite], recorded[finite].double()

    def remaining(temperature: float) -> float:
        logprobs, _ = ops.token_logprobs(logits, tokens, temperature)
        return float((logprobs.double() - recorded).abs().mean())

    best = _minimize(remaining)
    least = remaining(best)
    for digits in range(1, 5):
        rounded = round(best, digits)
        if rounded > 0 and remaining(rounded) <= 1.001 * least:
            return TemperatureFit(rounded, remaining(rounded))
    return TemperatureFit(best, least)


def _minimize(function: Callable[[float], float]) -> float:
    """The best of a grid, then a golden-section search (Kiefer 1953) between its neighbours."""
    grid = torch.linspace(math.log(LOWEST), math.log(HIGHEST), GRID, dtype=torch.float64).tolist()
    values = [function(math.exp(x)) for x in grid]
    at = values.index(min(values))
    low, high = grid[max(at - 1, 0)], grid[min(at + 1, GRID - 1)]
    inner = [high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)]
    found = [function(math.exp(x)) for x in inner]
    for _ in range(_STEPS):
        if found[0] <= found[1]:
            high = inner[1]
            inner = [high - _GOLDEN * (high - low), inner[0]]
            found = [function(math.exp(inner[0])), found[0]]
        else:
            low = inner[0]
            inner = [inner[1], low + _GOLDEN * (high - low)]
            found = [found[1], function(math.exp(inner[1]))]
    return math.exp((low + high) / 2)
