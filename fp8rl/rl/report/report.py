"""`report.html`: a run's curves, samples and spec in one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from markupsafe import Markup

from fp8rl.models.plain_yaml import parse_yaml
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.core.files import check_page, writing
from fp8rl.numerics.core.reading import BadLine, check_path, read_text
from fp8rl.rl.record.console import format_difference, format_percent
from fp8rl.rl.record.history import Event, Session, events_found, sessions_found
from fp8rl.rl.record.metrics import metric
from fp8rl.rl.record.metrics_log import Row, metrics_found
from fp8rl.rl.record.rollouts import RolloutRecord, rollouts_found, shown
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.report import page
from fp8rl.rl.report.charts import sections
from fp8rl.rl.report.page import Charts, Code, Column, Section, Table, Tile, Tone
from fp8rl.rl.report.summary import RunSummary, summarize, verdict

MARK, PART = Markup("<mark>{}</mark>"), Markup('<br><span class="dim">{} {}</span>')


def write_report(run_dir: str | Path) -> tuple[Path, list[str]]:
    """Write `report.html` into the run's directory from its metrics, sample rollouts and spec.

    Returns the report's path, and a sentence for each file with lines that could not be used.
    Raises UserError: the directory holds no run, or the run has no complete step.
    """
    check_path(run_dir, "report")
    run = RunDir(Path(run_dir).absolute())
    if not run.experiment.is_file():
        raise UserError(f"report: found no spec.yaml in {run.path}, expected a run directory. Correct the path.")
    check_page(run.report, "report")
    spec = read_text(run.experiment, "report", "the run's spec.yaml")
    rows, bad_rows = metrics_found(run.metrics)
    if not rows:
        raise UserError(
            f"report: found no row in {run.metrics}, expected at least one. Let the run complete a step. "
            + " ".join(_damage([(run.metrics, bad_rows)]))
        )
    events, bad_events = events_found(run.events)
    steps = run.rollout_steps()
    shown_steps = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    found_samples = [(step, *rollouts_found(run.rollouts(step))) for step in shown_steps]
    sessions, bad_sessions = sessions_found(run.sessions)
    files = [(run.metrics, bad_rows), (run.events, bad_events), (run.sessions, bad_sessions)]
    damage = _damage([*files, *((run.rollouts(step), bad) for step, _, bad in found_samples)])
    notes = [f"Note: {note.rstrip('.')}." for note in sessions[-1].notes] if sessions else []
    summary = summarize(rows, events)
    others = [event for event in events if event not in (*summary.warnings, *summary.interventions)]
    with writing(run.report, "report"):
        page.write_page(
            run.report,
            "run report",
            run.name,
            verdict(summary) + _early(rows[-1]["step"], spec, sessions) + notes + damage,
            [
                *sections(rows),
                _events("Interventions", summary.interventions, run),
                _events("Warnings", summary.warnings, run),
                _events("What it went on with", others, run),
                _answers(found_samples),
                _samples(found_samples),
                Section("Reference", *_facts(sessions), _metric_table(rows), Code("Resolved spec", spec)),
            ],
            tiles=_tiles(summary, rows),
            footer=" from metrics.jsonl, rollouts and spec.yaml of this run.",
        )
    return run.report, damage


def _damage(files: Sequence[tuple[Path, Sequence[BadLine]]]) -> list[str]:
    """Return a sentence for each file with lines that cannot be used."""
    return [
        f"{path.name}: {len(bad)} line{'s' * (len(bad) > 1)} cannot be used and {'are' if len(bad) > 1 else 'is'} left "
        f"out: {', '.join(f'line {line.number}: {line.found}' for line in bad[:3])}{' and more' * (len(bad) > 3)}."
        for path, bad in files
        if bad
    ]


def _early(last: int, spec: str, sessions: Sequence[Session]) -> list[str]:
    """Return why the run has not reached its last step; nothing if it has, or if the text of its spec is damaged."""
    try:
        wanted = parse_yaml(spec)["run"]["steps"]
    except (TypeError, KeyError, ValueError):
        wanted = None
    if not isinstance(wanted, int) or last >= wanted:
        return []
    if sessions and sessions[-1].ended is not None:
        return [f"The run ended after step {last} of {wanted}: {sessions[-1].why or 'its spec has been changed'}."]
    return [f"The run is at step {last} of {wanted}: it is still running, or was killed."]


def _events(title: str, events: Sequence[Event], run: RunDir) -> Section:
    columns: list[Column] = [("Step", "n"), ("Action", "code"), ("Why", ""), ("Capsule", "code")]
    rows = []
    for event in events:
        kept = event.capsule is not None and (run.path / event.capsule).is_dir()  # a run keeps only some capsules
        command = f"fp8rl explain {run.path}/{event.capsule}" if kept else ""
        rows.append((event.step, event.action, event.text, command))
    return Section(title, Table(columns, rows, "When, what and why")) if rows else Section(title)


Found = Sequence[tuple[int, Sequence[RolloutRecord], Sequence[BadLine]]]
"""For each step: its number, the answers in its rollouts file, and the file's damaged lines."""


def _answers(found: Found) -> Section:
    """Make histograms of the answers of a few steps."""
    lengths, rewards = [], []
    for step, records, _ in found:
        groups: dict[int, list[float]] = {}
        for record in records:
            groups.setdefault(record.group, []).append(record.reward)
        lengths.append({"name": f"step {step}", "x": [len(record.token_ids) for record in records]})
        rewards.append({"name": f"step {step}", "x": [fmean(group) for group in groups.values()]})
    charts = [
        {"title": "Answer lengths", "note": "", "series": lengths, "along": "tokens", "unit": "answers"},
        {"title": "Rewards by group", "note": "", "series": rewards, "along": "mean reward", "unit": "prompts"},
    ]
    return Section("Answers", Charts(charts)) if any(records for _, records, _ in found) else Section("Answers")


def _samples(found: Found) -> Section:
    """Show answers of a few steps, the newest step unfolded, with their references, which older runs have not kept."""
    samples = [(step, shown(records)) for step, records, _ in found]
    known = any(record.reference is not None for _, records in samples for record in records)
    columns: list[Column] = [("Prompt", "text"), ("Answer of the model", "text"), ("Reference", "text")]
    columns = [*columns[: 3 if known else 2], ("Reward", "n"), ("Mean |d|", "n")]
    tables = []
    for step, records in samples:
        rows = []
        for record in records:
            turns = [MARK.format(text) if by == "environment" else text for by, text in record.said] or [record.text]
            parts = record.reward_parts if len(record.reward_parts) > 1 else {}
            reward = [f"{record.reward:g}", *(PART.format(part, f"{value:g}") for part, value in parts.items())]
            d = "" if record.abs_diff_mean is None else format_difference(record.abs_diff_mean)
            answer = (Markup("").join(turns), *([record.reference or ""] if known else []))
            rows.append((record.prompt, *answer, Markup("").join(reward), d))
        tables.append(Table(columns, rows, f"Step {step}", open=step == samples[-1][0]))
    return Section("Sample rollouts", *tables)


def _facts(sessions: Sequence[Session]) -> list[Table]:
    """Return a table of each start of the run: machine, versions, code and times; nothing without sessions."""
    facts = []
    for session in sessions:
        seconds = "no end recorded" if session.seconds is None else f"{session.seconds:,.0f} s"
        started = datetime.fromtimestamp(session.started).astimezone()
        facts += [
            ("Started", f"{started:%Y-%m-%d %H:%M:%S %Z}, wall time {seconds}{session.why and ': ' + session.why}"),
            ("Machine", session.machine),
            ("Commit", session.commit or "not a git repository"),
            ("Versions", ", ".join(f"{name} {version}" for name, version in session.versions.items())),
        ]
    return [Table([("", ""), ("", "")], facts, "Where and with what")] if facts else []


def _tiles(summary: RunSummary, rows: Sequence[Row]) -> list[Tile]:
    """Make the headline numbers."""
    tiles = []
    if summary.accuracy_after is not None:
        before = "" if summary.accuracy_before is None else f"{summary.accuracy_before:.3f} before training"
        if summary.accuracy_change is not None:
            before += ", change {:+.3f} to {:+.3f} (95%, Newcombe)".format(*summary.accuracy_change)
        tiles.append(Tile(f"Held-out {summary.held_out}", f"{summary.accuracy_after:.3f}", before))
    elif summary.reward_last is not None:
        tiles.append(Tile("Mean reward", f"{summary.reward_last:.3f}", f"{summary.reward_first:.3f} at the first step"))
    if summary.largest_abs_diff is not None and summary.exact_fraction is not None:
        share = "all" if summary.exact_fraction == 1.0 else f"{format_percent(summary.exact_fraction)} of"
        below = f"{share} {summary.compared_tokens:,} tokens of the trainer's version exact"
        value = "0" if summary.largest_abs_diff == 0 else f"{summary.largest_abs_diff:.3g} nats"
        wrong = summary.nonfinite_tokens or summary.compared_steps < summary.steps
        tone: Tone = "good" if summary.bitwise_equal else "bad" if wrong else "neutral"
        tiles.append(Tile("Largest mismatch |d|", value, below, tone))
    if summary.largest_drift is not None:
        below = f"at most {summary.largest_drift:.3g}, over {summary.older_tokens:,} trained tokens"
        tiles.append(Tile("Mean drift of older tokens", f"{summary.mean_drift:.3g} nats", below))
    if summary.syncs:
        below = f"{summary.mismatched_tensors} mismatched tensors"
        tone = "good" if summary.verified_syncs == summary.syncs else "bad"
        tiles.append(Tile("Weight syncs verified", f"{summary.verified_syncs} / {summary.syncs}", below, tone))
    if summary.equal_reward_groups is not None:
        below = "of all; algorithms that compare a group's answers learn nothing there"
        tiles.append(Tile("Groups of equal rewards", f"{summary.equal_reward_groups:.0%}", below))
    named = {"perf/rollout_tokens_per_second": "sampled", "perf/train_tokens_per_second": "trained"}
    rates = {name: [row[measured] for row in rows if measured in row] for measured, name in named.items()}
    medians = [f"{median(values):,.0f} {name}" for name, values in rates.items() if values]
    if medians:
        tiles.append(Tile("Tokens per second", medians[0].partition(" ")[0], f"{', '.join(medians)}: medians"))
    seconds = "" if summary.step_seconds is None else f"{summary.step_seconds:.2f} s median"
    tiles.append(Tile("Steps", f"{summary.steps}", seconds))
    return tiles


def _metric_table(rows: Sequence[Row]) -> Table:
    """List every metric of the run in order of appearance: last, least and greatest value, unit and meaning."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "step"]
    table = []
    for name in names:
        values, declared = [row[name] for row in rows if name in row], metric(name)
        numbers = map(_number, (values[-1], min(values), max(values)))
        table.append((name, *numbers, declared.unit, declared.meaning, declared.over))
    columns: list[Column] = [("Metric", "code"), ("Last", "n"), ("Least", "n"), ("Greatest", "n")]
    return Table([*columns, ("Unit", ""), ("Meaning", ""), ("Over", "")], table, "All metrics", open=False)


def _number(value: Any) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"
