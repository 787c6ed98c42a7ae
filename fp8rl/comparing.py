"""Lists runs, and shows where the specs, metrics and curves of two runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.section import dotted
from fp8rl.rl.record.metrics import metric
from fp8rl.rl.record.metrics_log import Row
from fp8rl.rl.report import page
from fp8rl.rl.report.charts import overlaid
from fp8rl.rl.report.page import Section, write_page
from fp8rl.rl.report.summary import ABS_DIFF_MAX, summarize
from fp8rl.run import Run

LAST = 5
"""A run's final value is its mean over this many last steps."""
SECONDS = "perf/step_seconds"


@dataclass(frozen=True)
class Listing:
    """A table of texts. numbers: index of the first column of numbers; all columns after it are numbers too."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: int

    def rendered(self) -> Table:
        """Return the table for a terminal. A narrow terminal wraps long names. Names are not read as markup."""
        table = Table(title=self.title or None, box=SIMPLE_HEAD, pad_edge=False)
        for index, column in enumerate(self.columns):
            is_number = index >= self.numbers
            table.add_column(Text(column), overflow="fold", justify="right" if is_number else "left")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def on_a_page(self) -> page.Table:
        columns: list[page.Column] = [
            (name, "n" if index >= self.numbers else "") for index, name in enumerate(self.columns)
        ]
        return page.Table(columns, self.rows, f"{len(self.rows)} line{'s' * (len(self.rows) != 1)}")


def runs_in(folder: Path) -> list[Run]:
    """Find the runs of a folder, in the order of their names. Raises UserError: the folder has no run."""
    found = [Run(path.parent) for path in sorted(folder.glob("*/spec.yaml"))]
    if not found:
        raise user_error("--dir", str(folder), "a folder with runs", "Give another, or train first.")
    return found


def listed(runs: Sequence[Run]) -> Listing:
    """Return a table of runs: why each ended, its steps, last numbers and median step time, or why it is unreadable."""
    rows = []
    for run in runs:
        try:
            metrics = run.metrics
            done = metrics[-1]["step"] if metrics else 0
            names = ("rollout/reward_mean", "eval/accuracy", ABS_DIFF_MAX)
            numbers = [next((row[name] for row in reversed(metrics) if name in row), None) for name in names]
            numbers.append(summarize(metrics).step_seconds)
            ended = run.stopped or ("" if run.model is None else "well")
            rows.append([run.name, ended, f"{done}/{run.spec.run.steps}", *map(_brief, numbers)])
        except UserError as error:
            rows.append([run.name, f"cannot be read: {str(error).splitlines()[0]}", *[""] * 5])
    return Listing("", ["run", "ended", "steps", "reward", "held-out", "max abs d", "s / step"], rows, 2)


def specs_compared(one: Run, other: Run) -> Listing:
    """Return a table of the spec's keys whose values differ."""
    before, after = dict(dotted(one.spec.to_dict())), dict(dotted(other.spec.to_dict()))
    rows = [
        [key, str(before.get(key, "")), str(after.get(key, ""))]
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    return Listing("Specs, where they differ", ["key", *_labels([one, other])], rows, 3)


def metrics_compared(one: Run, other: Run, *, every: bool = False) -> Listing:
    """Compare the metrics of two runs: means over the last steps that both have, last evaluations, and the median time
    of a step.

    every: list all metrics. Otherwise equal metrics are left out, except metrics with a `shown_as`, which come first.
    """
    both = (one.metrics, other.metrics)
    one_by_step, other_by_step = ({row["step"]: row for row in metrics} for metrics in both)
    steps = sorted(one_by_step.keys() & other_by_step.keys())
    names = {name for metrics in both for row in metrics for name in row} - {"step"}
    rows, equal = [], 0
    for name in sorted(names, key=lambda name: (not metric(name).shown_as, name)):
        shared = [step for step in steps if name in one_by_step[step] and name in other_by_step[step]] or steps
        before, after = (_at_the_end(metrics, name, shared) for metrics in both)
        if before is None and after is None:
            continue
        if before == after and not every and not metric(name).shown_as:
            equal += 1
            continue
        difference = None if before is None or after is None else after - before
        rows.append([name, metric(name).unit, *map(_brief, (before, after, difference))])
    title = f"Metrics: means of the last {LAST} steps that both have, last values of eval/, median {SECONDS}"
    title += f"; {equal} more are equal (--all)" if equal else ""
    return Listing(title, ["metric", "unit", *_labels([one, other]), "difference"], rows, 2)


def write_comparison(path: Path, runs: Sequence[Run], tables: Sequence[Listing]) -> None:
    """Write an HTML page with the tables, and with charts that overlay the runs' curves."""
    charts = overlaid(dict(zip(_labels(runs), (run.metrics for run in runs), strict=True)))
    name = " and ".join(_labels(runs)) if len(runs) < 3 else f"{len(runs)} runs"
    shown = [*(Section(table.title or "Runs", table.on_a_page()) for table in tables), *charts]
    write_page(path, "comparison", name, [], shown, footer=" from the metrics.jsonl and spec.yaml of the runs.")


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return the runs' names, or their paths if two names are equal."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def _at_the_end(rows: Sequence[Row], name: str, steps: Sequence[int]) -> float | None:
    if name == SECONDS:
        return summarize(rows).step_seconds
    wanted = set(steps)
    values = [row[name] for row in rows if name in row and row["step"] in wanted]
    values = values[-1:] if name.startswith("eval/") else values[-LAST:]
    return fmean(values) if values else None


def _brief(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
