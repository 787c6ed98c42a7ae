"""The charts of a run's report as plain data; `templates/report.js` draws them with plotly."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from rl.report.summary import Row, evaluated_at

Chart = dict[str, Any]
"""`title`, `note` (what to look for), `traces` with x, y, name, and `y`: plotly settings of the value axis."""

PREFIX = "mismatch/train_rollout_logprob_abs_diff"
MIB = 2.0**20
_OF_A_SET = re.compile(r"eval/[^/]+/(accuracy|pass@\d+)")


def sections(rows: Sequence[Row]) -> list[tuple[str, list[Chart]]]:
    """Titled groups of charts. Charts without data, and groups without charts, are left out."""
    groups = [
        ("Learning", _learning(rows)),
        ("Agreement of trainer and engine", _agreement(rows)),
        ("Weight sync", _sync(rows)),
        ("Time", _time(rows)),
        ("Optimization", _optimization(rows)),
    ]
    drawn = [(title, [chart for chart in charts if chart["traces"]]) for title, charts in groups]
    return [(title, charts) for title, charts in drawn if charts]


def _learning(rows: Sequence[Row]) -> list[Chart]:
    evaluated = [{**row, "step": evaluated_at(row)} for row in rows]
    sets = [name for name in dict.fromkeys(name for row in rows for name in row) if _OF_A_SET.fullmatch(name)]
    accuracy = [
        _trace(evaluated, "eval/accuracy", "accuracy", markers=True),
        *(_trace(evaluated, name, name.removeprefix("eval/"), markers=True) for name in sets),
    ]
    reward = [_trace(rows, "rollout/reward_mean", "mean reward")]
    length = [
        _trace(rows, "rollout/response_tokens_mean", "mean"),
        _trace(rows, "rollout/response_tokens_max", "longest"),
    ]
    return [
        _chart("Reward", "Mean over the sampled trajectories of each step.", reward, "mean reward"),
        _chart(
            "Held-out accuracy",
            "Greedy decoding, but for sets that say otherwise; step 0 is before training.",
            accuracy,
            "fraction solved",
            range=[0, 1.02],
        ),
        _chart(
            "Groups of equal rewards",
            "All right or all wrong: no advantage, nothing to learn from.",
            [_trace(rows, "rollout/equal_reward_groups", "share")],
            "fraction of groups",
            range=[0, 1.02],
        ),
        _chart("Response length", "Generated tokens per trajectory.", length, "tokens", rangemode="tozero"),
    ]


def _agreement(rows: Sequence[Row]) -> list[Chart]:
    fractions = [
        _trace(rows, "mismatch/tis_clipfrac", "ρ > C"),
        _trace(rows, "mismatch/tis_clipfrac_two_sided", "ρ > C or ρ < 1/C", dash="dot"),
    ]
    divergence = [_trace(rows, "mismatch/k1_kl", "k1"), _trace(rows, "mismatch/k3_kl", "k3", dash="dot")]
    exact = [_trace(rows, "mismatch/exact_frac", "d = 0")]
    sample_size = [
        _trace(rows, "mismatch/ess", "tokens"),
        _trace(rows, "mismatch/ess_sequence", "sequences", dash="dot"),
    ]
    routing = [
        _trace(rows, "mismatch/router_agreement", "experts that both chose"),
        _trace(rows, "mismatch/router_token_differ_frac", "tokens that differ in any layer", dash="dot"),
    ]
    rejected = [
        _trace(rows, "train/rejected_tokens", "tokens"),
        _trace(rows, "train/rejected_sequences", "sequences", dash="dot"),
    ]
    return [
        _differences(rows),
        _chart("Exact tokens", "Share of sampled tokens with d = 0.", exact, "fraction of tokens", range=[0, 1.02]),
        _chart(
            "Tokens outside the TIS range",
            "ρ = e^d, trainer over rollout probability; C = the TIS cap.",
            fractions,
            "fraction of tokens",
            **_room_above_zero(fractions),
        ),
        _chart(
            "KL(rollout ‖ trainer)",
            "Two estimates on the sampled tokens; k3 is never negative.",
            divergence,
            "nats per token",
            **_room_above_zero(divergence),
        ),
        _chart(
            "Effective sample size",
            "Of the importance-weighted batch, over its size; 1 where nothing differs.",
            sample_size,
            "fraction",
            range=[0, 1.02],
        ),
        _chart(
            "Routing", "Experts of the sampled tokens, trainer against engine.", routing, "fraction", range=[0, 1.02]
        ),
        _chart(
            "Rejected",
            "Not trained on for their mismatch.",
            rejected,
            "fraction of the batch",
            **_room_above_zero(rejected),
        ),
    ]


def _differences(rows: Sequence[Row]) -> Chart:
    """|d| on a logarithmic axis. Exact zeros, which it cannot show, sit on a line of their own, labelled 0."""
    named = [(f"{PREFIX}_mean", "mean"), (f"{PREFIX}_p99", "99th percentile"), (f"{PREFIX}_max", "largest")]
    traces = [_trace(rows, name, label) for name, label in named]
    chart = _chart("Mismatch |d|", "d = trainer − rollout log-probability of a sampled token.", traces, "|d| in nats")
    values = [value for trace in chart["traces"] for value in trace["y"]]
    positive = [value for value in values if value > 0]
    if not positive:
        chart["y"].update(range=[-0.2, 1], tickvals=[0], ticktext=["0"])
        chart["annotation"] = "exactly 0 at every step"
        return chart

    lowest, highest = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    highest = max(highest, lowest + 1)
    has_zeros = len(positive) < len(values)
    every = max(1, (highest - lowest) // 6)
    ticks = list(range(lowest, highest + 1, every))
    bottom = lowest - 1 if has_zeros else lowest
    chart["y"].update(type="log", range=[bottom - 0.15, highest + 0.1])
    chart["y"].update(tickvals=[10.0**k for k in ticks], ticktext=[f"1e{k}" for k in ticks])
    if has_zeros:
        chart["y"]["tickvals"].insert(0, 10.0**bottom)
        chart["y"]["ticktext"].insert(0, "0")
        chart["zero_line"] = 10.0 ** (bottom + 0.5)
        for trace in chart["traces"]:
            trace["text"] = [f"{value:.4g}" for value in trace["y"]]
            trace["y"] = [value if value > 0 else 10.0**bottom for value in trace["y"]]
    return chart


def _sync(rows: Sequence[Row]) -> list[Chart]:
    tensors = [
        _trace(rows, "sync/verified_tensors", "verified"),
        _trace(rows, "sync/mismatched_tensors", "mismatched", color="bad"),
    ]
    sent = [_trace(rows, "sync/bytes", "bytes", scale=lambda value: value / MIB)]
    # The first one also compiles and maps memory: next to it the others would be a flat line.
    seconds = [_trace(rows[1:], "sync/seconds", "sync")]
    first = f" The first took {rows[0]['sync/seconds']:.2f} s." if rows and "sync/seconds" in rows[0] else ""
    return [
        _chart(
            "Tensors",
            "Engine against trainer, by digest, after every sync.",
            tensors,
            "tensors",
            rangemode="tozero",
        ),
        _chart("Duration", f"Digests and verification included.{first}", seconds, "seconds", rangemode="tozero"),
        _chart("Bytes sent", "Weights sent to one engine per sync.", sent, "MiB", rangemode="tozero"),
    ]


def _time(rows: Sequence[Row]) -> list[Chart]:
    timed = [row for row in rows if "perf/step_seconds" in row]
    parts = [
        ("rollout", "perf/rollout_seconds"),
        ("train", "perf/train_seconds"),
        ("sync", "sync/seconds"),
        ("evaluation", "perf/eval_seconds"),
        ("checkpoint", "perf/checkpoint_seconds"),
    ]
    present = [(label, name) for label, name in parts if any(name in row for row in timed)]
    stack = [_trace([{name: 0.0} | row for row in timed], name, label, bars=True) for label, name in present]
    rest = [
        {"step": row["step"], "rest": max(0.0, row["perf/step_seconds"] - sum(row.get(name, 0.0) for _, name in parts))}
        for row in timed
    ]
    stack.append(_trace(rest, "rest", "other", bars=True, color="muted"))
    speed = [
        _trace(rows, "perf/rollout_tokens_per_second", "rollout"),
        _trace(rows, "perf/train_tokens_per_second", "train"),
    ]
    return [
        _chart("Time per step", "Other: everything outside the named parts.", stack, "seconds", rangemode="tozero"),
        _chart("Throughput", "Generated and trained tokens.", speed, "tokens per second", rangemode="tozero"),
    ]


def _optimization(rows: Sequence[Row]) -> list[Chart]:
    norm = [_trace(rows, "train/grad_norm", "gradient norm")]
    entropy = [_trace(rows, "train/entropy", "entropy")]
    return [
        _chart("Loss", "Of the whole batch, before the update.", [_trace(rows, "train/loss", "loss")], "loss"),
        _chart("Gradient norm", "Before clipping.", norm, "global L2 norm", rangemode="tozero"),
        _chart("Entropy", "Mean over the target tokens.", entropy, "nats", rangemode="tozero"),
        _chart(
            "Learning rate",
            "Warm-up and decay included.",
            [_trace(rows, "train/lr", "lr")],
            "learning rate",
            rangemode="tozero",
        ),
    ]


def _trace(
    rows: Sequence[Row],
    name: str,
    label: str,
    *,
    scale: Callable[[float], float] = float,
    markers: bool = False,
    bars: bool = False,
    dash: str = "solid",
    color: str | None = None,
) -> dict[str, Any]:
    """One curve over the steps that have the metric."""
    points = [(row["step"], scale(row[name])) for row in rows if name in row]
    return {
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "name": label,
        "kind": "bars" if bars else "lines+markers" if markers or len(points) == 1 else "lines",
        "dash": dash,
        "color": color,
    }


def _chart(title: str, note: str, traces: Sequence[dict[str, Any]], y_title: str, **y: Any) -> Chart:
    shown = [trace for trace in traces if trace["x"]]
    return {"title": title, "note": note, "traces": shown, "y": {"title": y_title, **_around_constant(shown), **y}}


def _around_constant(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Axis settings for curves that are one level line; plotly's own reach from far below zero to far above."""
    values = {value for trace in traces for value in trace["y"]}
    if len(values) != 1 or any(trace["kind"] == "bars" for trace in traces):
        return {}
    (value,) = values
    return {"range": [-0.02, 1]} if value == 0 else {"range": sorted([-0.02 * value, 1.25 * value])}


def _room_above_zero(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Axis settings that keep a curve of zeros on the floor of its chart instead of in the middle of ±1."""
    if any(value for trace in traces for value in trace["y"]):
        return {"rangemode": "tozero"}
    return {"range": [-0.02, 1], "tickvals": [0], "ticktext": ["0"]}
