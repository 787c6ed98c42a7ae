"""Compares the formats that were seen on both sides with the precision map, class by class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fp8rl.diagnose.report import Finding, graded, grid
from fp8rl.models.formats import Sighting
from fp8rl.numerics.precision_map import CLASSES, DOCUMENTED

_NOT_IN_EVERY_RUN = {
    "head.weight",
    "product.cached",
    *(each.key for each in CLASSES if each.key.startswith("experts.")),
}
"""Classes that a run may lack: a head may be tied to the embedding, BF16 has no codes, a dense model no experts."""


@dataclass(frozen=True)
class Row:
    """One class of tensors; `key`, `row`, `tensors` and `document` are as in `precision_map.TensorClass`."""

    key: str
    row: str
    tensors: str
    document: str
    planned: list[str]
    """Formats that are allowed."""
    trainer: dict[str, int]
    """Counts by format in the trainer; empty if no such tensor was seen: there is none, or it is inside a kernel."""
    engine: dict[str, int]
    """The same in the engine."""
    bytes: int
    """Bytes of the tensors that are held or sent."""


def rows_of(sightings: Iterable[Sighting]) -> list[Row]:
    """Fill the precision map with all that was seen of each class."""
    by_key: dict[str, list[Sighting]] = {each.key: [] for each in CLASSES}
    for sighting in sightings:
        by_key[sighting.key].append(sighting)
    rows = []
    for each in CLASSES:
        seen, found = by_key[each.key], {"trainer": Counter[str](), "engine": Counter[str]()}
        for sighting in seen:
            found[sighting.side][sighting.found] += sighting.calls
        rows.append(
            Row(
                key=each.key,
                row=each.row,
                tensors=each.tensors,
                document=each.document,
                planned=list(dict.fromkeys(form for sighting in seen for form in sighting.planned)),
                **{side: dict(counts) for side, counts in found.items()},
                bytes=sum(sighting.bytes for sighting in seen),
            )
        )
    return rows


def differences_of(sightings: Sequence[Sighting]) -> list[Finding]:
    """Return what is not as planned, in the order of the map; tensors of one class and format are one finding."""
    wrong: dict[tuple[str, tuple[str, ...], str], dict[str, None]] = {}
    for sighting in sightings:
        if sighting.found not in sighting.planned:
            wrong.setdefault((sighting.key, sighting.planned, sighting.found), {})[sighting.name] = None
    classes = {each.key: each for each in CLASSES}
    order = list(classes)
    return [
        Finding(key, found, " or ".join(planned), f"{classes[key].why} {classes[key].remedy}", names=tuple(names))
        for (key, planned, found), names in sorted(wrong.items(), key=lambda item: order.index(item[0][0]))
    ]


def unseen(rows: Iterable[Row]) -> list[str]:
    """Return the classes that every model has, that the published map lists, and of which nothing was seen."""
    return [
        r.key for r in rows if r.row in DOCUMENTED and not (r.trainer or r.engine) and r.key not in _NOT_IN_EVERY_RUN
    ]


def map_table(rows: Iterable[Row], wrong: Collection[str]) -> Table:
    """Render the precision map. wrong: classes that are not as planned."""
    shown: list[tuple[RenderableType, ...]] = []
    last = ""
    for row in rows:
        if not (row.trainer or row.engine):
            continue
        if row.row != last:
            shown.append(("", Text(row.row, style="bold")))
        last = row.row
        sides = (", ".join(f"{form} x {n:,}" for form, n in side.items()) for side in (row.trainer, row.engine))
        size = f"{row.bytes:,}" if row.bytes else ""
        verdict = graded("FAIL", "error") if row.key in wrong else graded("pass", "ok")
        shown.append((verdict, f"  {row.key}", " or ".join(row.planned), *sides, size))
    return grid(("", "tensors", "planned", "trainer", "engine", "bytes"), shown, numbers=5)
