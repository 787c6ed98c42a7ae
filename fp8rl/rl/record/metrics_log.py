"""Writes and reads metrics.jsonl, one object of finite numbers per step; and times the parts of a step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp8rl.numerics.core.files import append_whole, write_atomically
from fp8rl.numerics.core.reading import BadLine, json_lines, whole_json_lines

Row = dict[str, Any]
DROPPED = "tracking/nonfinite_dropped"


class MetricsLog:
    """Appends rows to a metrics file. Rows of steps after `last` are removed, because a resumed run repeats them."""

    def __init__(self, path: Path, last: int) -> None:
        kept = [row for row in read_metrics(path) if row["step"] <= last]
        write_atomically(path, "".join(_line(row) for row in kept))
        self._path, self._file = path, path.open("ab", buffering=0)

    def append(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write the row of `step`. Return its finite metrics, and the number of metrics that were dropped."""
        values = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        finite[DROPPED] = len(values) - len(finite)
        append_whole(self._file, self._path, _line({"step": step, **finite}).encode())
        return finite

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Row]:
    """Read the rows of a metrics file in order; none if it is missing. Raises `UserError` for a line that is no row."""
    return whole_json_lines(path, "metrics", _row)


def metrics_found(path: Path) -> tuple[list[Row], list[BadLine]]:
    """Read a metrics file that may be damaged. Return its rows in rising order of steps, and its unusable lines."""
    rows, bad = json_lines(path, "metrics", _row)
    rising = {row["step"]: row for row in sorted(rows, key=lambda row: row["step"])}
    return list(rising.values()), bad


def _row(values: dict[str, Any]) -> Row:
    if not isinstance(values.get("step"), int) or isinstance(values["step"], bool) or values["step"] < 0:
        raise ValueError("no integer step, expected a row of metrics")
    for name, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(f"{name} is no finite number")
    return values


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


class StepClock:
    """Times steps and their phases. A step lasts from one `lap` to the next, so that nothing goes uncounted."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}
        self._within = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the block to the phase `name`, without the time of phases inside it."""
        start, outer, self._within = time.perf_counter(), self._within, 0.0
        try:
            yield
        finally:
            took = time.perf_counter() - start
            self._phases[name] = self._phases.get(name, 0.0) + took - self._within
            self._within = outer + took

    def lap(self) -> dict[str, float]:
        """End the step and begin the next one.

        Returns `perf/<phase>_seconds`, `perf/step_seconds`, and the time outside all phases as `perf/overhead_seconds`.
        The phase `sync` counts towards the step, but the sync itself reports it.
        """
        step = time.perf_counter() - self._start
        phases = self._phases
        self._begin()
        named = {f"perf/{name}_seconds": seconds for name, seconds in phases.items() if name != "sync"}
        return named | {"perf/step_seconds": step, "perf/overhead_seconds": step - sum(phases.values())}
