"""The report of an attribution: its findings and measurements, on the console, as JSON and as a page.

d is trainer minus rollout log-probability of a token, in nats.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.text import Text

from fp8rl.diagnose.report import grid
from fp8rl.numerics.core.files import write_atomically
from fp8rl.rl.record.console import format_difference

CauseName = Literal["weights", "sampler", "state", "op", "routing", "quantization", "scales"]
SHOWN_OPS = 12
SHOWN_EXPERTS = 8
LEAST = 1e-6
"""Relative RMS at which the colours of the page begin; exact zeros are blank."""
Chart = dict[str, Any]
"""The keys `title`, `note`, `kind` (heat or bars), `x`, `y`, and for heat maps `z` (log10 or null), `text` (hover)."""


@dataclass(frozen=True)
class OpDifference:
    """How the engine's op differs from the trainer's, on the trainer's inputs."""

    layer: int | None
    """The layer's number; None for an op outside the layers."""
    op: str
    differing: float
    """Fraction of output elements that are not equal."""
    relative_rms: float
    """||trainer - engine|| / ||trainer||, infinite if one side alone is not finite."""
    largest: float
    """The largest absolute difference."""


@dataclass(frozen=True)
class ExpertDifference:
    """How one expert of a layer differs between trainer and engine."""

    layer: int
    expert: int
    tokens: int
    """Tokens that the trainer sent to the expert."""
    relative_rms: float
    """Relative RMS of the expert's outputs on the trainer's inputs."""
    abs_diff_mean: float
    """Mean |d| of the expert's tokens, trainer against the engine's own forward pass; NaN if it has no tokens."""
    abs_diff_rest: float
    """The same mean over all other tokens."""


@dataclass(frozen=True)
class PositionDifference:
    """Mean |d| of sampled tokens at positions `start` to `stop` - 1 of their sequences, prompts counted."""

    start: int
    stop: int
    tokens: int
    abs_diff_mean: float


@dataclass(frozen=True)
class Cause:
    """One cause taken away: mean |d| before and after, on the same tokens."""

    name: CauseName
    before: float
    after: float
    note: str
    """The change that takes the cause away."""


@dataclass(frozen=True)
class Finding:
    """A sentence that answers where the mismatch comes from, and its subject."""

    cause: CauseName
    text: str
    op: str | None = None
    layers: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()
    """HF names of weights that differ."""


@dataclass(frozen=True)
class Attribution:
    """The sources of a mismatch."""

    findings: tuple[Finding, ...]
    """The findings by rank: the first is the answer; none if both sides agree."""
    abs_diff_mean: float
    """Mean |d| of the `tokens` sampled tokens as they were recorded."""
    tokens: int
    live_abs_diff_mean: float = 0.0
    """Mean |d| between trainer and engine as they are now, over the `traced_tokens` that were traced."""
    traced_tokens: int = 0
    ops: tuple[OpDifference, ...] = ()
    stream: tuple[float, ...] = ()
    """By layer, how far the engine's residual stream has drifted from the trainer's at its entry (relative RMS)."""
    causes: tuple[Cause, ...] = ()
    experts: tuple[ExpertDifference, ...] = ()
    positions: tuple[PositionDifference, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; numbers that are not finite become null."""

        def finite(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: finite(item) for name, item in value.items()}
            if isinstance(value, list | tuple):
                return [finite(item) for item in value]
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return finite(dataclasses.asdict(self))  # type: ignore[no-any-return]


def rendered(attribution: Attribution, compared: str = "") -> RenderableType:
    """Render findings, causes, and the ops and experts that differ most; compared: a sentence on the batch."""
    lines = [Text(f"{n}. {f.text}", style="bold" if n == 1 else "") for n, f in enumerate(attribution.findings, 1)]
    nothing = Text("No difference stands out.", style="green")
    parts: list[RenderableType] = [Group(Text(headline(attribution)), *(lines or [nothing]))]
    if compared:
        parts.append(Text(compared))
    causes, ops = _causes(attribution), _ops(sorted(attribution.ops, key=lambda op: -op.relative_rms)[:SHOWN_OPS])
    experts = []
    for e in sorted(attribution.experts, key=lambda expert: -expert.relative_rms)[:SHOWN_EXPERTS]:
        if e.relative_rms:
            means = ("" if math.isnan(x) else format_difference(x) for x in (e.abs_diff_mean, e.abs_diff_rest))
            experts.append((str(e.layer), str(e.expert), str(e.tokens), f"{e.relative_rms:.2e}", *means))
    for title, columns, rows in (
        ("one cause at a time", ("cause", "mean |d| before", "after", "what was changed"), causes),
        ("ops on equal inputs", ("layer", "op", "relative RMS", "elements", "largest"), ops),
        ("experts", ("layer", "expert", "tokens", "relative RMS", "mean |d|", "of the rest"), experts),
    ):
        parts += [grid(columns, rows, title=title)] if rows else []
    return Group(parts[0], *(each for part in parts[1:] for each in (Text(), part)))


def _causes(attribution: Attribution) -> list[tuple[str, ...]]:
    return [(c.name, format_difference(c.before), format_difference(c.after), c.note) for c in attribution.causes]


def _ops(ops: Sequence[OpDifference]) -> list[tuple[str, ...]]:
    d = format_difference
    return [
        ("" if op.layer is None else str(op.layer), op.op, d(op.relative_rms), f"{op.differing:.1%}", d(op.largest))
        for op in ops
        if op.relative_rms
    ]


def headline(attribution: Attribution) -> str:
    """Say what was compared."""
    a = attribution
    if a.abs_diff_mean == a.live_abs_diff_mean == 0.0:
        return f"d = 0 on {a.tokens:,} sampled tokens, and on the {a.traced_tokens:,} that both sides recomputed."
    mean, again = format_difference(a.abs_diff_mean), format_difference(a.live_abs_diff_mean)
    return (
        f"Mean |d| is {mean} on {a.tokens:,} sampled tokens. Both sides recomputed the sequences that differ most: "
        f"{again} on their {a.traced_tokens:,} tokens."
    )


def write_page(attribution: Attribution, name: str, path: Path, compared: str = "") -> None:
    """Write the page of the run or capsule `name` to `path`, and the attribution as JSON next to it.

    compared: a sentence on the batch, if it is not the run's own.
    """
    from fp8rl.rl.report import page  # not for the ranks of a trainer

    write_atomically(path.with_suffix(".json"), json.dumps(attribution.to_dict(), indent=1, allow_nan=False) + "\n")
    found = [finding.text for finding in attribution.findings]
    charts = [chart for chart in (_op_map(attribution), _expert_map(attribution), _positions(attribution)) if chart]
    causes, ops = _causes(attribution), _ops(attribution.ops)
    of_causes: list[page.Column] = [("Cause", ""), ("Before", "n"), ("After", "n"), ("What was changed", "")]
    of_ops: list[page.Column] = [("Layer", "n"), ("Op", "code"), ("Relative RMS", "n"), ("Elements", "n")]
    changed = "Mean |d| on the same tokens, before and after one thing is changed"
    ordered = "On the trainer's inputs, in the order of the forward pass"
    page.write_page(
        path,
        "attribution",
        name,
        [headline(attribution), *filter(None, [compared])],
        [
            page.Section(
                "Where the mismatch comes from",
                page.Sentences(found) if found else page.Paragraph("No difference stands out."),
            ),
            page.Section("Where it sits", *([page.Charts(charts)] if charts else ())),
            page.Section("One cause at a time", *([page.Table(of_causes, causes, changed)] if causes else ())),
            page.Section(
                "Ops that differ", *([page.Table([*of_ops, ("Largest", "n")], ops, ordered, open=False)] if ops else ())
            ),
        ],
        footer=". d is trainer minus rollout log-probability of a token, in nats.",
    )


def _op_map(attribution: Attribution) -> Chart | None:
    """Draw layers by ops. Ops outside the layers have a row of their own; the drift of the stream has a column."""
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
        "z": [[math.log10(min(max(value, LEAST), 1.0)) if value else None for value in row] for row in values],
        "text": [["" if value is None else format_difference(value) for value in row] for row in values],
    }
