"""`attribution.html`: findings, heat maps and tables of an attribution in one file that needs no network."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8rl.diagnose.attribution.result import Attribution
from fp8rl.diagnose.attribution.tables import headline
from fp8rl.numerics.io.files import write_atomically
from fp8rl.rl.record.console import format_difference
from fp8rl.rl.report import page

LEAST = 1e-6
"""Relative RMS at which the colours begin; exact zeros are blank."""

Chart = dict[str, Any]
"""`title`, `note`, `kind` (heat or bars), `x`, `y`, and for heat maps `z` (log10 or null) and `text` (on hovering)."""


def write_page(attribution: Attribution, name: str, path: Path, compared: str = "") -> None:
    """Write the page of the run or capsule `name` to `path`, and the attribution as JSON beside it.

    compared: a sentence on the batch, if it is not the run's own.
    """
    write_atomically(path.with_suffix(".json"), json.dumps(attribution.to_dict(), indent=1, allow_nan=False) + "\n")
    charts = [chart for chart in (_op_map(attribution), _expert_map(attribution), _positions(attribution)) if chart]
    page.write_page(
        path,
        "attribution",
        charts,
        kind="attribution",
        name=name,
        verdict=[headline(attribution), *filter(None, [compared])],
        findings=attribution.findings,
        causes=attribution.causes,
        ops=[op for op in attribution.ops if op.relative_rms],
    )


def _op_map(attribution: Attribution) -> Chart | None:
    """Layers by ops; the ops outside the layers stand in rows of their own, and the drift of the stream beside them."""
    if not any(op.relative_rms for op in attribution.ops) and not any(attribution.stream):
        return None  # both sides agree, and a map of zeros shows nothing
    found = {(op.layer, op.op): op for op in attribution.ops}
    ops = list(dict.fromkeys(op.op for op in attribution.ops))
    layers = sorted({layer for layer, _ in found if layer is not None})
    rows: list[int | None] = [*layers, None]
    values = [[found[row, op].relative_rms if (row, op) in found else None for op in ops] for row in rows]
    drift = [*attribution.stream, *[None] * (len(rows) - len(attribution.stream))]
    return {
        "title": "Ops on equal inputs",
        "note": "Relative RMS of the engine's output against the trainer's. Blank: equal in every bit. The last column "
        "is the drift of the residual stream into each layer when each side goes its own way.",
        **_heat(
            [*ops, "stream"],
            ["outside" if row is None else f"layer {row}" for row in rows],
            [[*row, d] for row, d in zip(values, drift, strict=True)],
        ),
    }


def _expert_map(attribution: Attribution) -> Chart | None:
    if not any(expert.relative_rms for expert in attribution.experts):
        return None
    found = {(expert.layer, expert.expert): expert.relative_rms for expert in attribution.experts}
    layers, experts = sorted({layer for layer, _ in found}), sorted({expert for _, expert in found})
    return {
        "title": "Experts on equal inputs",
        "note": "Relative RMS of each expert's own output.",
        **_heat(
            [f"expert {expert}" for expert in experts],
            [f"layer {layer}" for layer in layers],
            [[found[layer, expert] for expert in experts] for layer in layers],
        ),
    }


def _positions(attribution: Attribution) -> Chart | None:
    if not any(bucket.abs_diff_mean for bucket in attribution.positions):
        return None
    return {
        "title": "By position",
        "note": "Mean |d| of the recorded tokens by their place in the sequence, prompt included.",
        "kind": "bars",
        "x": [f"{bucket.start}–{bucket.stop - 1}" for bucket in attribution.positions],
        "y": [bucket.abs_diff_mean for bucket in attribution.positions],
    }


def _heat(x: list[str], y: list[str], values: Sequence[Sequence[float | None]]) -> Chart:
    return {
        "kind": "heat",
        "x": x,
        "y": y,
        "z": [[_shade(value) for value in row] for row in values],
        "text": [["" if value is None else format_difference(value) for value in row] for row in values],
    }


def _shade(value: float | None) -> float | None:
    """log10 within [LEAST, 1]; None for nothing and for zero."""
    return math.log10(min(max(value, LEAST), 1.0)) if value else None
