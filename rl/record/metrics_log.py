"""metrics.jsonl: one JSON object per step, every line whole, every number finite."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numerics.files import write_atomically

DROPPED = "tracking/nonfinite_dropped"


class MetricsLog:
    """Appends rows to a metrics file; steps rise strictly from row to row.

    A new run must find no rows. A resumed one keeps those up to `resume_step` and cuts the rest, which belong to
    steps that are about to be repeated.

    Raises:
        ValueError: a new run finds rows.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        rows = read_metrics(path)
        if rows and resume_step is None:
            raise ValueError(f"{path}: found {len(rows)} rows, expected none for a new run; resume it or remove them")
        kept = [row for row in rows if resume_step is not None and row["step"] <= resume_step]
        write_atomically(path, "".join(_line(row) for row in kept))
        self._last_step: int | None = kept[-1]["step"] if kept else None
        self._file = path.open("ab", buffering=0)

    def append(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write the row of `step` and return its metrics: the finite ones, and how many were dropped.

        Raises:
            ValueError: `step` is not above the last row's.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"step: found {step}, expected more than {self._last_step}, the last row's; log a step once"
            )
        values = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        finite[DROPPED] = len(values) - len(finite)
        # One unbuffered write per line: a reader or a kill sees a line whole or not at all.
        self._file.write(_line({"step": step, **finite}).encode())
        os.fsync(self._file.fileno())
        self._last_step = step
        return finite

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file in order, none if it is missing. A torn last line, left by a power cut, is ignored.

    Raises:
        ValueError: another line is not a JSON object with an integer `step`.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    return [_parse(line, number, path) for number, line in enumerate(lines[:-1], start=1)]


def _parse(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}: line {number} is not JSON ({error}); remove the line") from error
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError(f"{path}: line {number} has no integer step, expected a row of metrics; remove the line")
    return row


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
