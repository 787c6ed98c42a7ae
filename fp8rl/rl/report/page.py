"""An HTML page in one file that needs no network: sentences, tiles, and sections of charts, tables and texts.

`templates/page.html` renders the blocks, `templates/page.js` draws the charts with plotly.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal

import jinja2
import plotly.offline

from fp8rl.numerics.core.files import write_atomically

Tone = Literal["good", "bad", "neutral"]
Column = tuple[str, Literal["", "n", "text", "code"]]
"""A column's heading, and the kind of its cells: words (empty), numbers, texts of several lines, or code."""


@dataclass(frozen=True)
class Table:
    """A table. It has no head if all headings are empty."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[object]]
    summary: str = ""
    """The line under which the table is folded; empty: it is not folded."""
    open: bool = True
    form: ClassVar[str] = "table"


@dataclass(frozen=True)
class Charts:
    """Charts side by side: curves (`traces`), bars or histograms of several sides (`series`)."""

    charts: Sequence[dict[str, Any]]
    form: ClassVar[str] = "charts"


@dataclass(frozen=True)
class Paragraph:
    """A text in a dim colour."""

    text: str
    form: ClassVar[str] = "text"


@dataclass(frozen=True)
class Code:
    """A verbatim text, folded."""

    summary: str
    text: str
    form: ClassVar[str] = "code"


@dataclass(frozen=True)
class Svg:
    """An SVG figure made by this project, which is not escaped."""

    svg: str
    form: ClassVar[str] = "svg"


class Section:
    """A heading and the blocks below it. A section without blocks is left out."""

    def __init__(self, title: str, *blocks: Table | Charts | Paragraph | Code | Svg) -> None:
        self.title, self.blocks = title, blocks


@dataclass(frozen=True)
class Tile:
    """A headline number. tone: decides its colour."""

    label: str
    value: str
    below: str
    tone: Tone = "neutral"


def write_page(
    path: Path,
    kind: str,
    name: str,
    verdict: Sequence[str],
    sections: Sequence[Section],
    *,
    tiles: Sequence[Tile] = (),
    footer: str = "",
) -> None:
    """Write a page to `path`. kind, name: its kind and subject. verdict: the sentences at its beginning."""
    charts = [
        chart for section in sections for block in section.blocks if isinstance(block, Charts) for chart in block.charts
    ]
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("page.html").render(
        kind=kind,
        name=name,
        verdict=verdict,
        tiles=tiles,
        sections=[section for section in sections if section.blocks],
        footer=footer,
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        # JSON inside a script element must not contain "</script" or "<!--".
        charts_json=json.dumps(charts, allow_nan=False).replace("<", "\\u003c"),
        style=_read("page.css"),
        script=_read("page.js") if charts else "",
        plotly=plotly.offline.get_plotlyjs() if charts else "",
    )
    write_atomically(path, text)


def _read(name: str) -> str:
    return resources.files("fp8rl.rl.report").joinpath("templates", name).read_text(encoding="utf-8")
