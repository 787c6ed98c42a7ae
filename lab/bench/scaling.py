"""How the time of a step grows with its answers: work that grows faster than they do would show in the slope."""

from __future__ import annotations

import math
import statistics

from lab.bench.asynchrony import block, demo_stack
from lab.bench.measure import Result

PROMPTS = (8, 16, 32, 64)
ROUNDS, STEPS = 3, 3


def run() -> list[Result]:
    seconds: dict[int, list[float]] = {prompts: [] for prompts in PROMPTS}
    with demo_stack() as stack:
        answers = stack.experiment.rollout.group_size
        for index in range(1 + ROUNDS):
            for prompts, times in seconds.items():
                taken = block(stack, [f"rollout.prompts_per_step={prompts}"], STEPS)
                if index:  # the first round compiles
                    times.append(taken)
    medians = {prompts: statistics.median(times) for prompts, times in seconds.items()}
    return [
        Result(
            name="slope of log step time over log answers per step, 1 to 8 times (demo)",
            value=_slope([math.log(prompts) for prompts in medians], [math.log(taken) for taken in medians.values()]),
            bar=1.05,
            at_least=False,
            parts={f"{prompts * answers} answers (s)": taken for prompts, taken in medians.items()},
        )
    ]


def _slope(x: list[float], y: list[float]) -> float:
    return statistics.linear_regression(x, y).slope
