"""`report.html`: a run's curves, samples and spec in one file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import plotly.offline

from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.core.files import check_page, write_atomically, writing
from fp8rl.numerics.core.reading import BadLine, check_path, read_text
from fp8rl.rl.experiment import read_resolved
from fp8rl.rl.experiment.loading import parse_yaml
from fp8rl.rl.record.console import format_difference, format_percent
from fp8rl.rl.record.events import Session, events_found, sessions_found
from fp8rl.rl.record.metrics import metric
from fp8rl.rl.record.metrics_log import metrics_found
from fp8rl.rl.record.rollouts import rollouts_found, shown
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.report.charts import sections
from fp8rl.rl.report.summary import Row, RunSummary, by_kind, summarize, verdict
from fp8rl.rollout.data.sources import load_problems


def write_report(run_dir: str | Path) -> tuple[Path, list[str]]:
    """Write `report.html` into the run's directory from its metrics, sample rollouts and spec.

    Returns its path, and a sentence for each file that has lines which could not be used.

    Raises:
        UserError: the directory holds no run, or the run has no complete step.
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
    first_middle_last = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    found_samples = [(step, *rollouts_found(run.rollouts(step))) for step in first_middle_last]
    samples = [(step, shown(records)) for step, records, _ in found_samples]
    sessions, bad_sessions = sessions_found(run.sessions)
    files = [(run.metrics, bad_rows), (run.events, bad_events), (run.sessions, bad_sessions)]
    damage = _damage([*files, *((run.rollouts(step), bad) for step, _, bad in found_samples)])
    summary = summarize(rows, events)
    charts = sections(rows)
    warned, stepped_in = by_kind(events)
    others = [event for event in events if event not in warned and event not in stepped_in]
    with writing(run.report, "report"):
        write_page(
            run.report,
            "report",
            [chart for _, group in charts for chart in group],
            kind="run report",
            name=run.name,
            verdict=verdict(summary) + _early(rows[-1]["step"], spec, sessions) + _notes(sessions) + damage,
            tiles=_tiles(summary),
            sections=charts,
            events=[("Interventions", stepped_in), ("Warnings", warned), ("What it went on with", others)],
            facts=_facts(sessions),
            run=run.path,
            samples=samples,
            references=references(run, {record.prompt for _, records in samples for record in records}),
            metrics=_metric_table(rows),
            spec=spec,
        )
    return run.report, damage


def _damage(files: Sequence[tuple[Path, Sequence[BadLine]]]) -> list[str]:
    """A sentence for each file that has lines which cannot be used."""
    return [
        f"{path.name}: {len(bad)} line{'s' * (len(bad) > 1)} cannot be used and {'are' if len(bad) > 1 else 'is'} left "
        f"out: {', '.join(f'line {line.number}: {line.found}' for line in bad[:3])}{' and more' * (len(bad) > 3)}."
        for path, bad in files
        if bad
    ]


def _early(last: int, spec: str, sessions: Sequence[Session]) -> list[str]:
    """That the run has not got to its last step, if so, and why."""
    wanted = _steps_of(spec)
    if wanted is None or last >= wanted:
        return []
    if sessions and sessions[-1].ended is not None:
        return [f"It ended after step {last} of {wanted}: {sessions[-1].why or 'its spec has been changed'}."]
    return [f"It stands at step {last} of {wanted}: it is still running, or was killed."]


def _notes(sessions: Sequence[Session]) -> list[str]:
    """Return what was said of the input when the run was started last."""
    return [f"Note: {note.rstrip('.')}." for note in sessions[-1].notes] if sessions else []


def _steps_of(spec: str) -> int | None:
    """`run.steps` of the spec's text, which may be damaged."""
    try:
        steps = parse_yaml(spec)["run"]["steps"]
    except (TypeError, KeyError, ValueError):
        return None
    return steps if isinstance(steps, int) else None


def _facts(sessions: Sequence[Session]) -> list[tuple[str, str]]:
    """Return where and with what the run was made: name and value, of each start."""
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
    return facts


def _tiles(summary: RunSummary) -> list[dict[str, str]]:
    """The headline numbers: label, value, a line below it, and a standing that colours it."""
    tiles = []
    if summary.accuracy_after is not None:
        before = "" if summary.accuracy_before is None else f"{summary.accuracy_before:.3f} before training"
        if summary.accuracy_change is not None:
            before += ", change {:+.3f} to {:+.3f}".format(*summary.accuracy_change)
        tiles.append(_tile("Held-out accuracy", f"{summary.accuracy_after:.3f}", before))
    elif summary.reward_last is not None:
        tiles.append(
            _tile("Mean reward", f"{summary.reward_last:.3f}", f"{summary.reward_first:.3f} at the first step")
        )
    if summary.largest_abs_diff is not None and summary.exact_fraction is not None:
        share = "all" if summary.exact_fraction == 1.0 else f"{format_percent(summary.exact_fraction)} of"
        below = f"{share} {summary.compared_tokens:,} tokens of the trainer's version exact"
        value = "0" if summary.largest_abs_diff == 0 else f"{summary.largest_abs_diff:.3g} nats"
        tiles.append(_tile("Largest mismatch |d|", value, below, summary.agreement_standing))
    if summary.largest_drift is not None:
        below = f"at most {summary.largest_drift:.3g}, over {summary.older_tokens:,} trained tokens"
        tiles.append(_tile("Mean drift of older tokens", f"{summary.mean_drift:.3g} nats", below))
    if summary.syncs:
        below = f"{summary.mismatched_tensors} mismatched tensors"
        tiles.append(
            _tile("Weight syncs verified", f"{summary.verified_syncs} / {summary.syncs}", below, summary.sync_standing)
        )
    if summary.equal_reward_groups is not None:
        share = f"{summary.equal_reward_groups:.0%}"
        tiles.append(_tile("Groups of equal rewards", share, "of all: they teach nothing"))
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
        table.append(
            {"name": name, **numbers, "unit": declared.unit, "meaning": declared.meaning, "over": declared.over}
        )
    return table


def _number(value: Any) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


# Any HTML page in one file that needs no network: a template of `templates/`, its charts and plotly.


def write_page(
    path: Path, template: str, charts: Sequence[dict[str, Any]] | None, *, script: str = "", **content: Any
) -> None:
    """Render `template`.html, which extends page.html, to `path`.

    charts: what `script`.js (else `template`.js) draws, in the order of the template's elements; None: it draws
        nothing, and needs no plotly.
    content: the template's variables; page.html itself needs `name`, `kind` and `verdict`, its sentences.
    """
    page = _environment().get_template(f"{template}.html")
    text = page.render(
        **content,
        charts=charts,
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        # JSON inside a script element must not contain "</script" or "<!--".
        charts_json=json.dumps(charts, allow_nan=False).replace("<", "\\u003c"),
        style=_read("page.css"),
        script="" if charts is None else _read("page.js") + _read(f"{script or template}.js"),
        plotly="" if charts is None else plotly.offline.get_plotlyjs(),
    )
    write_atomically(path, text)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["difference"] = lambda value: "" if value is None else format_difference(value)
    return environment


def _read(name: str) -> str:
    return resources.files("fp8rl.rl.report").joinpath("templates", name).read_text(encoding="utf-8")


# The reference answers of the questions that a report shows, read from the run's data where they still lie.

MOST_READ = 100_000
"""Problems of a source that are looked through."""


def references(run: RunDir, questions: set[str]) -> dict[str, str]:
    """Return the reference answer of each question that the run's training data have once, by the question.

    Rollouts do not record it. The data may have been moved since, and a spec may be damaged: what is not found is left
    out.
    """
    found: dict[str, set[str]] = {}
    try:
        sources = read_resolved(run.experiment).data.training if questions else ()
    except UserError:
        return {}
    for source in sources:
        if not Path(source.path).exists():
            continue
        try:
            for problem in islice(load_problems(source), MOST_READ):
                if problem.question in questions:
                    found.setdefault(problem.question, set()).add(problem.answer)
        except UserError:
            continue
    return {question: next(iter(answers)) for question, answers in found.items() if len(answers) == 1}
