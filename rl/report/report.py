"""`report.html`: a run's curves, samples and spec in one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numerics.errors import UserError
from rl.record.console import format_percent
from rl.record.events import read_events
from rl.record.metrics import metric
from rl.record.metrics_log import read_metrics
from rl.record.rollouts import read_rollouts, shown
from rl.record.run_dir import RunDir
from rl.report import page
from rl.report.charts import sections
from rl.report.summary import Row, RunSummary, summarize, verdict


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into the run's directory from its metrics, sample rollouts and spec; return its path.

    Raises:
        UserError: the directory holds no run, or the run has no complete step.
    """
    run = RunDir(Path(run_dir).absolute())
    if not run.experiment.is_file():
        raise UserError(f"report: found no spec.yaml in {run.path}, expected a run directory. Correct the path.")
    rows = read_metrics(run.metrics)
    if not rows:
        raise UserError(f"report: found no row in {run.metrics}, expected at least one. Let the run complete a step.")
    events = read_events(run.events)
    summary = summarize(rows, events)
    charts = sections(rows)
    page.write_page(
        run.report,
        "report",
        [chart for _, group in charts for chart in group],
        kind="run report",
        name=run.name,
        verdict=verdict(summary),
        tiles=_tiles(summary),
        sections=charts,
        events=events,
        run=run.path,
        samples=[(step, shown(read_rollouts(run.rollouts(step)))) for step in _shown_steps(run)],
        metrics=_metric_table(rows),
        spec=run.experiment.read_text(encoding="utf-8"),
    )
    return run.report


def _tiles(summary: RunSummary) -> list[dict[str, str]]:
    """The headline numbers: label, value, a line below it, and a standing that colours it."""
    tiles = []
    if summary.accuracy_after is not None:
        before = "" if summary.accuracy_before is None else f"{summary.accuracy_before:.3f} before training"
        tiles.append(_tile("Held-out accuracy", f"{summary.accuracy_after:.3f}", before))
    elif summary.reward_last is not None:
        tiles.append(
            _tile("Mean reward", f"{summary.reward_last:.3f}", f"{summary.reward_first:.3f} at the first step")
        )
    if summary.largest_abs_diff is not None and summary.exact_fraction is not None:
        share = "all" if summary.exact_fraction == 1.0 else f"{format_percent(summary.exact_fraction)} of"
        below = f"{share} {summary.compared_tokens:,} tokens exact"
        value = "0" if summary.largest_abs_diff == 0 else f"{summary.largest_abs_diff:.3g} nats"
        tiles.append(_tile("Largest mismatch |d|", value, below, summary.agreement_standing))
    if summary.syncs:
        below = f"{summary.mismatched_tensors} mismatched tensors"
        tiles.append(
            _tile("Weight syncs verified", f"{summary.verified_syncs} / {summary.syncs}", below, summary.sync_standing)
        )
    seconds = "" if summary.step_seconds is None else f"{summary.step_seconds:.2f} s median"
    tiles.append(_tile("Steps", f"{summary.steps}", seconds))
    return tiles


def _tile(label: str, value: str, below: str, standing: str = "neutral") -> dict[str, str]:
    return {"label": label, "value": value, "below": below, "standing": standing}


def _metric_table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Every metric of the run: last, least and greatest value, unit and meaning, in the order of first appearance."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "step"]
    table = []
    for name in names:
        values = [row[name] for row in rows if name in row]
        declared = metric(name)
        numbers = {"last": _number(values[-1]), "least": _number(min(values)), "greatest": _number(max(values))}
        table.append({"name": name, **numbers, "unit": declared.unit, "meaning": declared.meaning})
    return table


def _number(value: Any) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def _shown_steps(run: RunDir) -> list[int]:
    """The first, the middle and the last step with samples."""
    steps = run.rollout_steps()
    return sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
