"""An HTML page in one file that needs no network: a template of `templates/`, its charts and plotly."""

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
from fp8rl.numerics.core.files import write_atomically
from fp8rl.rl.experiment import read_resolved
from fp8rl.rl.record.console import format_difference
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rollout.data.sources import load_problems


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
