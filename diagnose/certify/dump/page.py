"""The page of a dump: the verdict, the comparisons, and where the differences sit, in one file without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8rl.diagnose.certify.dump.report import DumpReport, differences, sentence
from fp8rl.rl.report import page

Chart = dict[str, Any]
"""`title`, `note`, `unit` of the values, `x` labels, and `series` of `name` and `y`."""
_NOTES = {
    "place in the answer": "A difference that grows along the answer adds up: a cache, or a beginning that is another.",
    "length of the answer": "Tokens of all answers of such a length.",
    "temperature": "A temperature that is treated wrongly stands out.",
    "probability of the token": "By the model in FP32. Rare tokens differ most wherever numbers are rounded.",
    "kind of token": "Special tokens, such as the end of an answer, against text.",
    "weight version": "The version whose weights were scored should differ least.",
}


def write_page(report: DumpReport, path: Path) -> None:
    """Write the page to `path`."""
    page.write_page(
        path,
        "certify",
        _charts(report),
        kind="certify",
        name=Path(report.dump).name,
        verdict=[sentence(side, report) for side in report.sides],
        report=report,
        rows=differences(report),
    )


def _charts(report: DumpReport) -> list[Chart]:
    names = [side.name for side in report.sides] + ["floor"]
    sizes = list(report.histogram["floor"])
    spread: Chart = {
        "title": "How large differences are",
        "note": "Tokens by |d| from the model in FP32: exactly 0, and from each power of ten up to the next.",
        "unit": "tokens",
        "x": sizes,
        "series": [{"name": name, "y": [report.histogram[name][size] for size in sizes]} for name in names],
    }
    charts = [spread]
    for by in dict.fromkeys(part.by for part in report.parts):
        some = [part for part in report.parts if part.by == by]
        if len(some) > 1:
            series = [{"name": name, "y": [part.means[name] for part in some]} for name in names]
            x = [f"{part.label} ({part.tokens:,})" for part in some]
            title = f"By {by}"
            charts.append({"title": title, "note": _NOTES[by], "unit": "mean |d| in nats", "x": x, "series": series})
    return charts
