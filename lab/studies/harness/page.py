"""A study's `table.md` and `index.html`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fp8rl.rl.report import page
from lab.studies.harness.claims import Judged
from lab.studies.harness.result import Result
from lab.studies.harness.study import TextTable

CLAIMS_COLUMNS = ("claim", "it says", "found", "95% interval", "verdict")
LEGEND = (
    "×: how many times another arm's value it is. A sign: a difference from another arm. nats: of a token's "
    "log-probability, the mean over tokens. n: seeds, or sequences of all seeds. p: corrected for all claims (Holm)."
)
"""What the tables of claims mean."""


def claims_table(result: Result) -> TextTable:
    """A table of all claims with their verdicts."""
    rows = [
        [judged.claim.id, judged.claim.says, *found_of(judged, result), verdict_of(judged)] for judged in result.judged
    ]
    return TextTable("Claims", CLAIMS_COLUMNS, rows)


def for_a_terminal(result: Result) -> Group:
    """A table of all claims with their verdicts, as wide as the terminal, and what its numbers mean."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, ratio in (("claim", 2), ("verdict", 3), ("found", 2), ("95% interval", 3), ("it says", 8)):
        table.add_column(heading, ratio=ratio, overflow="fold")
    for judged in result.judged:
        verdict = verdict_of(judged).replace("**", "")
        table.add_row(judged.claim.id, verdict, *found_of(judged, result), judged.claim.says)
    return Group(table, Text(LEGEND, style="dim"))


def markdown(table: TextTable) -> str:
    """A table in Markdown, under its title in bold."""
    return f"**{table.title}**\n\n{grid(table.columns, table.rows)}"


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    head, *lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in [columns, *rows]]
    rule = " | ".join("---" for _ in columns)
    return "\n".join(f"| {line} |" for line in [head, rule, *lines])


def write_tables(path: Path, result: Result) -> None:
    """`table.md`."""
    tables = [claims_table(result), *result.study.tables(result.measurement)]
    head = f"# {result.study.name}\n\n{result.study.question}\n\n{LEGEND}\n\n{result.caption()}"
    path.write_text("\n\n".join([head, *map(markdown, tables)]) + "\n", encoding="utf-8")


def write_index(path: Path, result: Result, figures: Mapping[str, str]) -> None:
    """`index.html`: verdicts, figures and tables in one file that needs no network."""
    tables = [claims_table(result), *result.study.tables(result.measurement)]
    shown = [
        page.Section(
            table.title,
            *([page.Paragraph(LEGEND)] if table is tables[0] else ()),
            page.Table(
                [(column, "") for column in table.columns],
                [[cell.replace("**", "") for cell in row] for row in table.rows],
            ),
        )
        for table in tables
    ]
    drawn = page.Section(result.study.question, *map(page.Svg, figures.values()))
    page.write_page(
        path, "study", result.study.name, _sentences(result), [drawn, *shown], footer=f" · {result.caption()}"
    )


def _sentences(result: Result) -> Sequence[str]:
    counts: dict[str, int] = {}
    for judged in result.judged:
        if not judged.claim.control:
            counts[judged.verdict] = counts.get(judged.verdict, 0) + 1
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    withheld = next((judged.why for judged in result.judged if judged.why), "")
    return [f"Claims: {told}." + (f" No verdicts: {withheld}." if withheld else "")]


def found_of(judged: Judged, result: Result) -> tuple[str, str]:
    """The estimate with its unit, and its interval with the number of seeds or sequences."""
    found, kind = judged.found, judged.claim.contrast
    unit = "" if kind == "ratio" else result.study.units.get(judged.claim.metric.partition("/")[0], "")
    shown = {"ratio": "×{}", "difference": "{:+}", "value": "{}"}[kind]

    def text(value: float) -> str:
        rounded = float(f"{value:.3g}")
        return shown.format(rounded)

    interval = "exact" if found.low == found.high else f"{text(found.low)} to {text(found.high)}"
    return f"{text(found.value)} {unit}".rstrip(), f"{interval} (n = {found.count})"


def verdict_of(judged: Judged) -> str:
    """The verdict in Markdown, with its p-value or the reason why there is none."""
    if judged.claim.control:
        unless_confirmed = f"undecided in {judged.why}" if judged.why else "FAILS"
        return f"{judged.claim.control} control: {'holds' if judged.verdict == 'confirmed' else unless_confirmed}"
    if judged.verdict == "undecided":
        return f"undecided; an effect of {judged.visible:.3g} could have been seen"
    if judged.verdict == "withheld":
        return f"none: {judged.why}"
    strong = judged.verdict in ("confirmed", "contradicted")
    text = f"**{judged.verdict}**" if strong else judged.verdict
    return f"{text} (p {'< 1e-4' if judged.p < 1e-4 else f'= {judged.p:.2g}'})"
