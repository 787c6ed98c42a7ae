"""Compares two recordings of the same ops, by op and by expert, and finds the temperature of recorded tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.models.program import CHOSEN, EACH, Forward, OpSite
from fp8rl.numerics import ops

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class OpDifference:
    """How the engine's op differs from the trainer's, on the trainer's inputs."""

    layer: int | None
    """The layer's number; None for an op outside the layers."""
    op: str
    differing: float
    """The fraction of output elements that differ."""
    relative_rms: float
    """||trainer - engine|| / ||trainer||, infinite if only one side is finite."""
    largest: float
    """The largest absolute difference."""

    @property
    def place(self) -> str:
        """The op's place in the model, such as `layers.1.qkv`."""
        return self.op if self.layer is None else f"layers.{self.layer}.{self.op}"


@dataclass(frozen=True)
class ExpertDifference:
    """How one expert's output differs between trainer and engine, on the trainer's inputs."""

    layer: int
    expert: int
    tokens: int
    """Tokens that the trainer sent to the expert."""
    relative_rms: float

    @property
    def place(self) -> str:
        return f"layers.{self.layer}.experts.{self.expert}"


def op_differences(forward: Forward, experts: int, trainer: Tensors, engine: Tensors) -> list[OpDifference]:
    """Compare every op of the trainer's recording with the engine's answer, in the order of the forward pass. A choice
    of experts is compared by the probabilities of all `experts`, which are 0 for experts not chosen."""

    def compared(site: OpSite, side: Tensors) -> Tensor:
        values = [side[site.key(name)] for name in site.op.writes]
        if CHOSEN in site.op.writes:
            probs, chosen = values
            return probs.new_zeros(len(probs), experts).scatter(1, chosen.long(), probs)
        return torch.cat([value.reshape(len(value), -1) for value in values], 1)

    found = []
    for site in forward.sites():
        ours, theirs = compared(site, trainer), compared(site, engine)
        apart = difference(ours, theirs)
        differing = (apart != 0).double().mean().item()
        largest = apart.abs().max().item() if apart.numel() else 0.0
        found.append(OpDifference(site.layer, site.op.name, differing, relative_rms(ours, theirs), largest))
    return found


def relative_rms(ours: Tensor, theirs: Tensor) -> float:
    """||ours - theirs|| / ||ours|| over all elements, in float64; infinite if the difference is not finite."""
    apart = float(difference(ours, theirs).norm())
    if apart == 0:
        return 0.0
    norm = float(ours.double().norm())
    return apart / norm if math.isfinite(apart) and norm > 0 else math.inf


def expert_differences(forward: Forward, experts: int, trainer: Tensors, engine: Tensors) -> list[ExpertDifference]:
    """Compare every expert of every layer, by the trainer's routing."""
    found = []
    for site in forward.sites():
        if CHOSEN in site.op.writes:
            chosen = trainer[site.key(CHOSEN)]
        if site.layer is None or CHOSEN not in site.op.reads:
            continue
        ours, theirs = (side[site.key(EACH)] for side in (trainer, engine))
        for expert in range(experts):
            here = chosen == expert
            tokens = int(here.any(1).sum())
            found.append(ExpertDifference(site.layer, expert, tokens, relative_rms(ours[here], theirs[here])))
    return found


def difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the difference in float64: 0 where both are equal, even if neither is finite."""
    ours, theirs = ours.double(), theirs.double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return torch.where(same, 0.0, ours - theirs)


# Finds the temperature at which tokens were sampled.

LOWEST, HIGHEST, GRID, ROUNDS = 0.05, 10.0, 24, 8
"""The search tries GRID temperatures from LOWEST to HIGHEST, in equal ratios. Each further round narrows the range by
a factor of 11.5; after ROUNDS it is below FP32's resolution."""


@dataclass(frozen=True)
class TemperatureFit:
    """The temperature that explains recorded log-probabilities best."""

    temperature: float
    abs_diff_mean: float
    """The mean |d| that remains at this temperature."""


def fit_temperature(logits: Tensor, tokens: Tensor, recorded: Tensor) -> TemperatureFit:
    """Return the temperature at which log_softmax(logits / temperature) is nearest to the recorded log-probabilities.

    The distance is the mean absolute difference over tokens whose recorded value is finite. If a value with fewer
    digits fits as well, it is returned, because people write temperatures with few digits.

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

    best = minimize(remaining)
    least = remaining(best)
    for digits in range(1, 5):
        rounded = round(best, digits)
        if rounded > 0 and remaining(rounded) <= 1.001 * least:
            return TemperatureFit(rounded, remaining(rounded))
    return TemperatureFit(best, least)


def minimize(function: Callable[[float], float]) -> float:
    """Minimize a function on a grid, then on finer and finer grids between the neighbours of the best point."""
    low, high = math.log(LOWEST), math.log(HIGHEST)
    for _ in range(ROUNDS):
        grid = torch.linspace(low, high, GRID, dtype=torch.float64).tolist()
        at = min(range(GRID), key=lambda index: function(math.exp(grid[index])))
        low, high = grid[max(at - 1, 0)], grid[min(at + 1, GRID - 1)]
    return math.exp((low + high) / 2)
