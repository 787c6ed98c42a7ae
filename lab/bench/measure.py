"""Timing sides against each other, and the form of a result."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of the table.

    value: what is compared with the bar, a ratio or fraction. bar: its limit; at_least: whether it is a lower one.
    parts: the measurements behind it, by name with unit.
    """

    name: str
    value: float
    bar: float
    at_least: bool
    parts: Mapping[str, float]

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


def run_benchmark(name: str, rows: Path) -> None:
    """Append the results of `lab/bench/<name>.py`, on one thread, to a file: a line of JSON each, as soon as it is
    measured."""
    torch.set_num_threads(1)
    for result in import_module(f"bench.{name}").run():
        with rows.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def read_rows(path: Path) -> list[Result]:
    """Return the results in a file of `run_benchmark`."""
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()]


def table_of(results: list[Result]) -> Table:
    """One line a result; what misses its bar has an exclamation mark."""
    from rich.table import Table

    table = Table("what", "found", "bar", "measurements")
    for result in results:
        bar = f"{'>=' if result.at_least else '<='} {result.bar:g}"
        parts = ", ".join(f"{name} {_number(value)}" for name, value in result.parts.items())
        table.add_row(result.name, f"{result.value:.3g}{'' if result.passed else ' !'}", bar, parts)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
