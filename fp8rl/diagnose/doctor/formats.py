"""Compares the formats of the tensors seen on both sides with the precision map, class by class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fp8rl.diagnose.report import Finding, graded, grid
from fp8rl.models.formats import Side, Sighting
from fp8rl.numerics.precision_map import CLASSES, DOCUMENTED

BY_KEY = {each.key: each for each in CLASSES}
OPTIONAL = {"head.weight", "product.cached", *(key for key in BY_KEY if key.startswith("experts."))}
"""Classes that a run may lack: a head may be tied to the embedding, BF16 has no codes, a dense model has no experts."""


@dataclass(frozen=True)
class Row:
    """One class of tensors of the precision map, and what was seen of it."""

    key: str
    planned: list[str]
    """Formats that are allowed."""
    trainer: dict[str, int]
    """Counts by format in the trainer. Empty: there is no such tensor, or it is inside a kernel."""
    engine: dict[str, int]
    """Counts by format in the engine."""
    bytes: int
    """Bytes of the tensors that are held or sent."""


def rows_of(sightings: Iterable[Sighting]) -> list[Row]:
    """Return a row of the precision map for each class, with all its sightings."""
    by_key: dict[str, list[Sighting]] = {key: [] for key in BY_KEY}
    for sighting in sightings:
        by_key[sighting.key].append(sighting)
    rows = []
    for key, seen in by_key.items():
        planned = list(dict.fromkeys(form for sighting in seen for form in sighting.planned))
        counts: dict[Side, Counter[str]] = {"trainer": Counter(), "engine": Counter()}
        for sighting in seen:
            counts[sighting.side][sighting.found] += sighting.calls
        size = sum(sighting.bytes for sighting in seen)
        rows.append(Row(key, planned, dict(counts["trainer"]), dict(counts["engine"]), size))
    return rows


def differences_of(sightings: Iterable[Sighting]) -> list[Finding]:
    """Return a finding for each class and format that was not planned, in the order of the map."""
    wrong: dict[tuple[str, tuple[str, ...], str], dict[str, None]] = {}
    for sighting in sightings:
        if sighting.found not in sighting.planned:
            wrong.setdefault((sighting.key, sighting.planned, sighting.found), {})[sighting.name] = None
    order = [*BY_KEY]
    return [
        Finding(key, found, " or ".join(planned), f"{BY_KEY[key].why} {BY_KEY[key].remedy}", names=tuple(names))
        for (key, planned, found), names in sorted(wrong.items(), key=lambda item: order.index(item[0][0]))
    ]


def unseen(rows: Iterable[Row]) -> list[str]:
    """Return the classes of the published map that every model has, and that were not seen."""
    lacking = [row.key for row in rows if not (row.trainer or row.engine)]
    return [key for key in lacking if BY_KEY[key].row in DOCUMENTED and key not in OPTIONAL]


def map_table(rows: Iterable[Row], wrong: Collection[str]) -> Table:
    """Render the precision map. wrong: classes that are not as planned."""
    shown: list[tuple[RenderableType, ...]] = []
    last = ""
    for row in rows:
        if not (row.trainer or row.engine):
            continue
        if (heading := BY_KEY[row.key].row) != last:
            shown.append(("", Text(heading, style="bold")))
        last = heading
        sides = (", ".join(f"{form} x {n:,}" for form, n in side.items()) for side in (row.trainer, row.engine))
        verdict = graded("FAIL", "error") if row.key in wrong else graded("pass", "ok")
        shown.append((verdict, f"  {row.key}", " or ".join(row.planned), *sides, f"{row.bytes:,}" if row.bytes else ""))
    return grid(("", "tensors", "planned", "trainer", "engine", "bytes"), shown, numbers=5)
