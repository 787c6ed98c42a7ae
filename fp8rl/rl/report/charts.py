"""The charts of a run's report as plain data; `templates/page.js` draws them with plotly.

The registry (`rl.record.metrics`) says which metrics are the curves of a chart; this module says how a chart looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fp8rl.rl.record.metrics import METRICS, held_out_is, metric
from fp8rl.rl.record.metrics_log import Row
from fp8rl.rl.report.page import Charts, Section
from fp8rl.rl.report.summary import evaluated_at

Chart = dict[str, Any]
"""`title`, `note` (what to look for), `traces` with x, y, name, and `y`: plotly settings of the value axis."""

HELD_OUT = "Held-out accuracy"
"""Title of the chart of held-out problems, if their rewards are all 0 or 1."""
AGE = "Age of the tokens"
"""Title of the chart of tokens by the age of the weights that sampled them."""
TIME = "Time per step"
"""Title of the chart in which the parts of a step's time are stacked."""
MIB = 2.0**20
_DASHES = ("solid", "dot", "dash", "dashdot")


@dataclass(frozen=True)
class ChartStyle:
    note: str
    """A sentence on what to look for."""
    unit: str
    """Text of the value axis."""
    scale: Literal["plain", "share", "floor", "log"] = "plain"
    """The value axis, a name in `_AXES`."""
    bars: bool = False
    """The curves are drawn as stacked bars."""


_AXES: dict[str, dict[str, Any]] = {
    "share": {"range": [0, 1.02]},
    "floor": {"rangemode": "tozero"},
    "log": {"type": "log"},
    "plain": {},
}
"""Plotly's settings of a value axis: from 0 to 1, from 0, logarithmic and without zeros, or plotly's own."""

SECTIONS: dict[str, dict[str, ChartStyle]] = {
    "Learning": {
        "Reward": ChartStyle("Mean over the answers of each step.", "mean reward"),
        "Parts of the reward": ChartStyle("Each function's mean, without its weight.", "mean"),
        "Outcomes of the environment": ChartStyle("Mean over the answers of each number that it returned.", "mean"),
        HELD_OUT: ChartStyle(
            "Greedy decoding, unless a set has a temperature; step 0 is before training.", "fraction solved", "share"
        ),
        "Groups of equal rewards": ChartStyle(
            "Algorithms that compare the answers of a group learn nothing from such a group.",
            "fraction of groups",
            "share",
        ),
        "Response length": ChartStyle("Generated tokens of an answer.", "tokens", "floor"),
    },
    "Agreement of trainer and engine": {
        "Mismatch |d|": ChartStyle(
            "d = trainer − rollout log-probability of a token of the trainer's version.", "|d| in nats", "log"
        ),
        "Exact tokens": ChartStyle("Share of the compared tokens with d = 0.", "fraction of tokens", "share"),
        "Tokens outside the TIS range": ChartStyle(
            "ρ = e^d, trainer over rollout probability; C = the TIS cap.", "fraction of tokens", "floor"
        ),
        "KL(rollout ‖ trainer)": ChartStyle(
            "Two estimates on the compared tokens; k3 is never negative.", "nats per token", "floor"
        ),
        "Effective sample size": ChartStyle(
            "Of tokens or sequences weighted by their ρ, divided by their number; 1 if nothing differs.",
            "fraction",
            "share",
        ),
        "Bias": ChartStyle("The part of d that persists over steps and adds up in the weights.", "nats", "floor"),
        "Routing": ChartStyle("Experts of the sampled tokens, trainer against engine.", "fraction", "share"),
        "Rejected": ChartStyle("Not trained on, because of the mismatch.", "fraction of the batch", "floor"),
    },
    "Older tokens": {
        AGE: ChartStyle(
            "Versions between the weights that sampled a trained token and the trainer's.", "tokens", "floor", bars=True
        ),
        "Drift of older tokens |d|": ChartStyle(
            "How far the policy has moved since it sampled them. This is no mismatch.", "|d| in nats", "log"
        ),
        "Drift by age": ChartStyle("Mean |d| of tokens so many versions old.", "|d| in nats", "floor"),
        "KL(older ‖ current policy)": ChartStyle("Two estimates on the older tokens.", "nats per token", "floor"),
    },
    "Weight sync": {
        "Tensors": ChartStyle("Engine against trainer, by digest, after every sync.", "tensors", "floor"),
        "Duration": ChartStyle("Digests and verification included.", "seconds", "floor"),
        "Bytes sent": ChartStyle("Weights sent to one engine per sync.", "MiB", "floor"),
    },
    "Time": {
        TIME: ChartStyle("Other: everything outside the named parts.", "seconds", "floor", bars=True),
        "Throughput": ChartStyle("Generated and trained tokens.", "tokens per second", "floor"),
        "Memory by turns": ChartStyle(
            "What one side releases for the other's turn. What engines keep should not grow.", "MiB", "floor"
        ),
    },
    "Optimization": {
        "Loss": ChartStyle("Of the whole batch, before the update.", "loss"),
        "Gradient norm": ChartStyle("Before clipping.", "global L2 norm", "floor"),
        "Merged updates": ChartStyle(
            "Between the update before and after quantization; 1 if all of it survives.", "cosine", "floor"
        ),
        "Entropy": ChartStyle("Mean over the target tokens.", "nats", "floor"),
        "KL to other models": ChartStyle(
            "Of the policy: mean over the target tokens. To the reference it is 0 at first.", "nats"
        ),
        "Importance weight": ChartStyle(
            "Trainer over rollout probability, at most the cap; 1 if nothing differs.", "weight", "floor"
        ),
        "Clipped tokens": ChartStyle("None in the first update of a fresh batch.", "fraction of tokens"),
        "The critic": ChartStyle("1 if it predicts every return, 0 if it knows only their mean.", "share"),
        "The critic's loss": ChartStyle("Before its update.", "loss", "floor"),
        "Values and returns": ChartStyle("Means over the target tokens: what was predicted, and what came.", "reward"),
        "Learning rate": ChartStyle("Warm-up and decay included.", "learning rate", "floor"),
    },
}


def sections(rows: Sequence[Row]) -> list[Section]:
    """Return titled groups of charts. Charts without data, and groups without charts, are left out."""
    return _grouped([("", rows, _curves(rows))])


def overlaid(runs: Mapping[str, Sequence[Row]]) -> list[Section]:
    """Return charts that overlay the curves of several runs. A run has a colour of its own, or a dash style if a chart
    has several curves. Stacked bars cannot be overlaid, so their chart has the time of whole steps instead."""
    drawn = [(name, rows, _curves(rows)) for name, rows in runs.items()]
    for _, rows, curves in drawn:
        curves.pop(AGE, None)
        curves.pop(TIME, None)
        if any("perf/step_seconds" in row for row in rows):
            curves[TIME] = [("perf/step_seconds", "whole step")]
    return _grouped(drawn)


Drawn = tuple[str, Sequence[Row], dict[str, list[tuple[str, str]]]]
"""A run's name, its rows, and for each chart's title the (metric, label) of its curves."""


def _curves(rows: Sequence[Row]) -> dict[str, list[tuple[str, str]]]:
    found = {name: metric(name).chart for row in rows for name in row}
    curves: dict[str, list[tuple[str, str]]] = {}
    for name in [*(name for name in METRICS if name in found), *sorted(found.keys() - METRICS.keys())]:
        if (drawn := found[name]) is not None:
            curves.setdefault(drawn[0], []).append((name, drawn[1]))
    if len(curves.get(AGE, ())) == 1:
        del curves[AGE]  # all tokens are of the trainer's version
    if "sync/seconds" in found:
        curves["Duration"] = [("sync/seconds", "sync")]
    return curves


def _grouped(runs: Sequence[Drawn]) -> list[Section]:
    found = []
    for section, looks in SECTIONS.items():
        drawn = (_chart(title, look, runs) for title, look in looks.items() if any(title in run[2] for run in runs))
        charts = [chart for chart in drawn if chart["traces"]]
        found += [Section(section, Charts(charts))] if charts else []
    return found


def _chart(title: str, look: ChartStyle, runs: Sequence[Drawn]) -> Chart:
    several, shown_as = len(runs) > 1, title
    if title == TIME and several:
        look = ChartStyle("Wall time of a step.", look.unit, look.scale)
    if title == HELD_OUT and held_out_is(*(row for _, rows, _ in runs for row in rows)) == "reward":
        shown_as, look = "Held-out reward", ChartStyle(look.note, "mean reward")
    note, traces = look.note, []
    for index, (name, rows, curves) in enumerate(runs):
        wanted = curves.get(title, [])
        if title == HELD_OUT:
            rows = [{**row, "step": evaluated_at(row)} for row in rows]
            if shown_as != HELD_OUT:
                wanted = [(measured, label.replace("accuracy", "reward")) for measured, label in wanted]
        if title == "Duration" and rows and "sync/seconds" in rows[0]:
            # The first sync also compiles and maps memory. Next to it the others would be a flat line.
            if not several:
                note = f"{note} The first took {rows[0]['sync/seconds']:.2f} s."
            rows = rows[1:]
        if title == TIME and not several:
            parts = [measured for measured, _ in wanted]
            whole = [dict.fromkeys(parts, 0.0) | row for row in rows if "perf/step_seconds" in row]
            rows = [
                {**row, _REST: max(0.0, row["perf/step_seconds"] - sum(map(row.__getitem__, parts)))} for row in whole
            ]
            wanted = [*wanted, (_REST, "other")]
        for curve, (measured, label) in enumerate(wanted):
            trace = _trace(rows, measured, label, look, curve)
            if several:
                alone = len(wanted) == 1
                trace["name"] = name if alone else f"{label}, {name}"
                trace["color"] = f"c{(index if alone else curve) % _COLORS}"
                trace["dash"] = _DASHES[index % len(_DASHES)]
            traces.append(trace)
    traces = [trace for trace in traces if trace["x"]]
    positive = any(value > 0 for trace in traces for value in trace["y"])
    axis = _AXES[look.scale if look.scale != "log" or positive else "plain"]
    return {"title": shown_as, "note": note, "traces": traces, "y": {"title": look.unit, **axis}}


_COLORS = 5
"""How many colours for curves templates/page.css has."""
_REST = "rest"
"""The time of a step outside all of its parts."""


def _trace(rows: Sequence[Row], name: str, label: str, look: ChartStyle, index: int) -> dict[str, Any]:
    """Return one curve over the steps that have the metric."""
    scale = MIB if metric(name).unit == "bytes" else 1.0
    points = [(row["step"], row[name] / scale) for row in rows if name in row]
    lines = "lines+markers" if name.startswith("eval/") or len(points) == 1 else "lines"
    return {
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "name": label,
        "kind": "bars" if look.bars else lines,
        "dash": _DASHES[index % len(_DASHES)],
        "color": {"sync/mismatched_tensors": "bad", _REST: "muted"}.get(name),
    }
