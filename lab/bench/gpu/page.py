"""The report as a page in Markdown, and in short on the terminal."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lab.bench.journal import Report
from lab.bench.measure import Result, table_of


def write(report: Report, path: Path) -> None:
    path.write_text("\n".join(lines(report)) + "\n")


def lines(report: Report) -> Iterator[str]:
    """The page: what measured, what came of it in one table, then every part with its rows."""
    machine = report.machine
    facts = {
        "device": machine["device"],
        **{name: machine[name] for name in ("memory_gib", "capability", "cuda") if name in machine},
        **{name: version or "not installed" for name, version in machine["versions"].items()},
    }
    yield f"# What was measured on {machine['device']}, {machine['date']}\n"
    yield from _table(({"what": name, "found": value} for name, value in facts.items()))
    missed = [result.name for result in report.results if not result.passed]
    yield f"\n{len(report.results) - len(missed)} of {len(report.results)} bars are met."
    yield f"\nNot met: {'; '.join(missed) or 'none'}."
    yield f"\nParts that did not come to their end: {', '.join(report.failed) or 'none'}."
    for part, rows in report.rows.items():
        when = f"{report.dates.get(part, 'not begun')}, {report.seconds.get(part, 0):g} s"
        yield f"\n## {part}\n{report.shows.get(part, '')} ({when}).\n"
        if part in report.failed:
            yield f"**It did not come to its end: {report.failed[part]}.** What it had measured by then:\n"
        yield from _table(_judged(result) for result in report.by_part.get(part, []))
        yield ""
        yield from _table(rows)
        yield from (f"\nLeft out: {what}: {why}" for what, why in report.left_out.get(part, {}).items())


def show(report: Report) -> None:
    """Print results, and what was left out or failed."""
    if importlib.util.find_spec("rich") is None:  # a bare machine with a GPU
        for result in report.results:
            print(f"{result.name}: {result.value:.3g}{'' if result.passed else ' !'} (bar {result.bar:g})")
    else:
        from rich.console import Console

        Console(width=160).print(table_of(report.results))
    for part, reasons in report.left_out.items():
        for what, why in reasons.items():
            print(f"left out of {part}: {what}: {why}")
    for part, why in report.failed.items():
        print(f"{part} did not come to its end: {why}")


def _judged(result: Result) -> dict[str, Any]:
    return {
        "what": result.name,
        "found": f"{result.value:.4g}{'' if result.passed else ' **!**'}",
        "bar": f"{'>=' if result.at_least else '<='} {result.bar:g}",
        "measurements": ", ".join(f"{name} {value:.4g}" for name, value in result.parts.items()),
    }


def _table(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Columns in the order in which rows first have them."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if rows:
        yield f"| {' | '.join(map(_cell, columns))} |"
        yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(_cell(row.get(name, '')) for name in columns)} |"


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
