"""Lines of JSON that benchmarks write as they measure, and the report that is read from them.

A line is written by one call, so a benchmark that is killed leaves whole lines.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab.bench.measure import Result


@dataclass(frozen=True)
class Journal:
    """The lines of one benchmark, in a file that the others write to before and after it."""

    path: Path
    part: str

    def say(self, line: dict[str, Any]) -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write((json.dumps({"part": self.part, **line}) + "\n").encode())


@dataclass
class Report:
    """Everything that a journal says, by benchmark."""

    machine: dict[str, Any]
    shows: dict[str, str] = field(default_factory=dict)
    dates: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    by_part: dict[str, list[Result]] = field(default_factory=dict)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    """Why something could not be measured."""
    failed: dict[str, str] = field(default_factory=dict)
    """Benchmarks that did not come to their end, whose rows count all the same."""

    @property
    def results(self) -> list[Result]:
        return [result for results in self.by_part.values() for result in results]

    @property
    def passed(self) -> bool:
        return not self.failed and all(result.passed for result in self.results)

    def write(self, path: Path) -> None:
        results = [
            {"part": part, **asdict(result), "passed": result.passed}
            for part, results in self.by_part.items()
            for result in results
        ]
        said = {name: value for name, value in vars(self).items() if name != "by_part"}
        path.write_text(json.dumps({**said, "results": results}, indent=1) + "\n")


def read(path: Path) -> Report:
    """The last run of each benchmark, of those on the machine that wrote last."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    begun = [line["begin"] for line in lines if "begin" in line]
    report = Report(begun[-1] if begun else {"device": "unknown: no part has begun", "date": "", "versions": {}})
    kept: dict[str, bool] = {}
    for line in lines:
        part = line["part"]
        if "begin" in line:
            for values in vars(report).values():
                if values is not report.machine:
                    values.pop(part, None)
            kept[part] = {**line["begin"], "date": None} == {**report.machine, "date": None}
        if not kept.setdefault(part, True):
            continue
        report.rows.setdefault(part, [])
        match line:
            case {"begin": machine, "shows": shows}:
                report.dates[part], report.shows[part] = machine["date"], shows
            case {"row": row}:
                report.rows[part].append(row)
            case {"result": result}:
                report.by_part.setdefault(part, []).append(Result(**result))
            case {"left_out": [what, why]}:
                report.left_out.setdefault(part, {})[what] = why
            case {"failed": why}:
                report.failed.setdefault(part, why)  # the first to say so knows the cause
            case {"seconds": seconds}:
                report.seconds[part] = seconds
    return report
