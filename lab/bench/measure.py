"""Results with their bars, and sides that are timed against each other."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

DEMO = Path("examples/models/tiny_qwen3_moe")


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of the table."""

    name: str
    value: float
    """A ratio or a fraction, which is compared with the bar."""
    bar: float
    at_least: bool
    """The bar is a lower limit."""
    parts: Mapping[str, float]
    """The measurements behind the value, by name with unit."""

    @property
    def passed(self) -> bool:
        return self.value >= self.bar if self.at_least else self.value <= self.bar


def interleaved(
    sides: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Wall seconds of every side in every round. Sides take turns, so that a slow spell of the machine hits all.

    clock: `time.process_time` counts this process's own seconds instead, whatever else the machine does.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(warmup + rounds):
        for name, run in sides.items():
            start = clock()
            run()
            if index >= warmup:
                times[name].append(clock() - start)
    return times


def median_ratio(numerator: list[float], denominator: list[float]) -> float:
    """Median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def table_of(results: list[Result]) -> Table:
    """One line a result; what misses its bar has an exclamation mark."""
    from rich.table import Table

    table = Table("what", "found", "bar", "measurements")
    for result in results:
        bar = f"{'>=' if result.at_least else '<='} {result.bar:g}"
        parts = ", ".join(f"{name} {value:{',.0f' if value >= 100 else '.3g'}}" for name, value in result.parts.items())
        table.add_row(result.name, f"{result.value:.3g}{'' if result.passed else ' !'}", bar, parts)
    return table
