"""Runs side by side: which there are, and how two of them differ in spec and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from fp8rl.run import Run
from numerics.errors import user_error
from rl.record.metrics import metric

LAST = 5
"""Steps that stand for the end of a run."""
_LISTED = {
    "reward": "rollout/reward_mean",
    "held-out": "eval/accuracy",
    "max abs d": "mismatch/train_rollout_logprob_abs_diff_max",
    "s / step": "perf/step_seconds",
}


def runs_in(folder: Path) -> list[Run]:
    """The runs of a folder by name.

    Raises:
        UserError: there is none.
    """
    found = [Run(path.parent) for path in sorted(folder.glob("*/spec.yaml"))]
    if not found:
        raise user_error(
            "--dir", found=str(folder), expected="a folder with runs", remedy="Give another, or train something."
        )
    return found


def listed(runs: list[Run]) -> Table:
    """A line for each run: how far it is, its last numbers, and why it stopped."""
    table = Table("run", "steps", *_LISTED, "ended")
    for run in runs:
        rows = run.metrics
        done = rows[-1]["step"] if rows else 0
        numbers = [_brief(_last(run, name)) for name in _LISTED.values()]
        table.add_row(
            run.name, f"{done}/{run.spec.run.steps}", *numbers, run.stopped or ("" if run.model is None else "well")
        )
    return table


def specs_compared(one: Run, other: Run) -> Table:
    """The keys whose values differ."""
    table = Table("key", one.name, other.name, title="Specs, where they differ")
    before, after = dict(_flat(one.spec.to_dict())), dict(_flat(other.spec.to_dict()))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            table.add_row(key, str(before.get(key, "")), str(after.get(key, "")))
    return table


def metrics_compared(one: Run, other: Run) -> Table:
    """The mean of each metric over the last steps that both runs have."""
    title = f"Metrics, mean of the last {LAST} steps that both have"
    table = Table("metric", "unit", one.name, other.name, "difference", title=title)
    both = sorted({row["step"] for row in one.metrics} & {row["step"] for row in other.metrics})
    for name in sorted({name for run in (one, other) for row in run.metrics for name in row} - {"step"}):
        mean = [_mean(run, name, both) for run in (one, other)]
        if mean[0] is not None and mean[1] is not None:
            unit = metric(name).unit
            table.add_row(name, unit, _brief(mean[0]), _brief(mean[1]), _brief(mean[1] - mean[0]))
    return table


def _mean(run: Run, name: str, steps: list[int]) -> float | None:
    values = run.metric(name)
    found = [values[step] for step in steps if step in values][-LAST:]
    return fmean(found) if found else None


def _last(run: Run, name: str) -> float | None:
    values = run.metric(name)
    return values[max(values)] if values else None


def _brief(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + key, value
