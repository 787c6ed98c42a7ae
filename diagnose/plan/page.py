"""A plan as tables for people and as JSON for machines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diagnose.doctor.judge import Remark
from diagnose.plan.plan import Plan
from diagnose.plan.time import StepTime
from diagnose.report import SCHEMA
from rl.experiment.budget.memory import PHASES
from trainer.config import TrainerConfig

_PARTS = ("products", "quantization", "attention", "elementwise", "launches", "transfers", "optimizer", "bubble")


def to_json(plan: Plan) -> str:
    """The fields of Plan, and `schema` and `ok`; of the job, its layout, batch and numerics."""
    job = plan.job
    values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan) if field.name != "job"}
    values = {name: _plain(value) for name, value in values.items()}
    values["fewest"] = None if plan.fewest is None else _sizes(plan.fewest)
    values["job"] = {
        "layout": _sizes(job.layout) | {"micro_batch_tokens": job.layout.micro_batch_tokens},
        "numerics": job.numerics.to_dict(),
        "rows": job.rows,
        "length": job.length,
        "micro_batches": job.micro_batches,
        "engines": job.engines,
        "engine_tp": job.engine_tp,
    }
    for name, memory in plan.memory.items():
        values["memory"][name]["peak"] = memory.peak
    return json.dumps({"schema": SCHEMA, "ok": plan.ok} | values, indent=1)


def rendered(plan: Plan) -> RenderableType:
    """The model, its bytes, its times, and the verdict in words."""
    parts: Iterable[RenderableType] = (
        _heading(plan),
        Text(),
        _memory(plan),
        Text(),
        _times(plan),
        Text(plan.efficiency.source, style="dim"),
        Text(),
        *((_decode(plan), Text()) if plan.decode else ()),
        *map(_remark, plan.remarks),
        *_verdict(plan),
    )
    return Group(*parts)


def _heading(plan: Plan) -> RenderableType:
    job, layout = plan.job, plan.job.layout
    numerics = f"{job.numerics.mode} mode, trainer {job.numerics.trainer}, rollout {job.numerics.rollout}"
    lines = [
        f"{plan.subject}: {plan.parameters:,} parameters, {plan.active_parameters:,} of them multiply a token",
        f"  {plan.training_flops / 1e9:.3g} GFLOP a token at {job.length:,} tokens; {plan.kv_bytes:,} bytes in a cache",
        f"{plan.gpus} x {plan.gpu.name}, tp {layout.tp} pp {layout.pp} ep {layout.ep} dp {layout.dp}"
        + (f" cp {layout.cp}" if layout.cp > 1 else "")
        + f", {numerics}",
        f"  {job.rows:,} rows of {job.length:,} tokens a step, {job.micro_batches} micro-batches of "
        f"{job.micro_batch:,}" + (f"; engines of {job.engine_tp}" if job.engines else ""),
    ]
    return Text("\n".join(lines))


def _memory(plan: Plan) -> Table:
    ours = plan.memory[plan.decides]
    beside = " beside an engine" if plan.decides == "colocated" else ""
    table = Table(f"GB, rank {ours.rank}{beside}", *PHASES, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, held in ours.held.items():
        table.add_row(name, *(_gb(held.get(phase, 0.0)) for phase in PHASES))
    totals = {"colocated": "colocated", "trainer": "trainer alone", "engine": "engine alone"}
    for name, title in totals.items():
        if plan.job.engines or name == "trainer":
            table.add_row(Text(title, style="bold"), *(_gb(plan.memory[name].in_phase(phase)) for phase in PHASES))
    if len(plan.stages) > 1:
        for stage, memory in enumerate(plan.stages):
            table.add_row(f"  trainer, stage {stage}", *(_gb(memory.in_phase(phase)) for phase in PHASES))
    return table


def _times(plan: Plan) -> Table:
    table = Table("s a training step", "FP8, slow", "FP8, fast", "BF16, slow", "BF16, fast", box=None, pad_edge=False)
    if not plan.job.fp8:
        table.columns[1].header, table.columns[2].header = "as planned, slow", "as planned, fast"
    for column in table.columns[1:]:
        column.justify = "right"
    columns = [side[corner] for side in (plan.fp8, plan.bf16) for corner in ("slow", "fast")]
    for part in _PARTS:
        table.add_row(
            part, *(_launches(time) if part == "launches" else _seconds(getattr(time, part)) for time in columns)
        )
    table.add_row(Text("step", style="bold"), *(_seconds(time.total) for time in columns))
    return table


def _decode(plan: Plan) -> Table:
    ours = plan.job.numerics.rollout
    table = Table(
        "decoding", "answers", f"tokens/s, {ours}", "tokens/s, bf16", "weights read (GB)", "cache read (GB)",
        box=None, pad_edge=False,
    )  # fmt: skip
    for side, bf16 in plan.decode:
        speeds = (f"{side.tokens_per_second:,.0f}", f"{bf16.tokens_per_second:,.0f}")
        table.add_row("an engine", str(side.batch), *speeds, _gb(side.weights), _gb(side.cache))
    return table


def _verdict(plan: Plan) -> list[Text]:
    held, job = plan.memory, plan.job
    apart = f"; {held['trainer'].peak / 1e9:.1f} and {held['engine'].peak / 1e9:.1f} apart" if job.engines else ""
    largest = plan.largest_micro_batch[plan.decides]
    free = f"slack: {plan.slack / 1e9:.1f} GB ({plan.slack / plan.gpu.memory:.1%})"
    if plan.slack < 0:
        free = f"memory is short by {-plan.slack / 1e9:.1f} GB"
    lines = [
        f"memory: {held[plan.decides].peak / 1e9:.1f} of {plan.gpu.memory / 1e9:.0f} GB{apart}",
        f"{free}; a real run needs {plan.needed_slack / 1e9:.1f} GB free ({plan.needed_slack / plan.gpu.memory:.0%})",
        f"micro-batches of up to {plan.largest_with_slack:,} tokens leave that much; up to {largest:,} fit at all",
        _gpus_that_would_do(plan),
        f"on CPUs a trainer rank's process would peak at {plan.on_a_cpu[1] / 1e9:.3g} GB",
    ]
    if job.engines:
        sent, in_bf16 = (each / 1e9 for each in plan.sync_bytes)
        lines.append(f"a sync sends {sent:.3g} GB to each engine ({in_bf16:.3g} in BF16)")
    speed = plan.tokens_per_second
    lines.append(f"a GPU trains {speed.low:,.0f} to {speed.high:,.0f} tokens a second while it trains")
    if job.fp8:
        slow, fast = (f"{tokens:,}" if tokens else "never" for tokens in plan.break_even)
        ratio = plan.fp8_over_bf16
        lines.append(f"an FP8 step takes {ratio.low:.2f} to {ratio.high:.2f} times as long as a BF16 step: {plan.pays}")
        lines.append(f"FP8 is faster from so many tokens a step: {fast} (fast corner), {slow} (slow corner)")
    lines.append(f"left out of these numbers: {'; '.join(plan.left_out)}")
    end, style = "the plan fits", "bold green"
    if not plan.ok:
        end, style = "the plan does not hold", "bold red"
    elif plan.slack < plan.needed_slack:
        end, style = "the plan fits by calculation, but leaves less free than a real run needs", "bold yellow"
    return [*map(Text, lines), Text(end, style=style)]


def _gpus_that_would_do(plan: Plan) -> str:
    layout, beside = plan.fewest, "" if plan.fewest_apart else " beside an engine"
    if layout is None:
        return f"no number of {plan.gpu.name} would do for the trainer with these micro-batches, whatever the layout"
    if plan.fewest_apart and plan.decides == "colocated":
        beside = ", with engines on GPUs of their own"
    sizes = " ".join(f"{name} {size}" for name, size in _sizes(layout).items())
    return f"fewest GPUs that would do for the trainer{beside}: {layout.world_size} (for example {sizes})"


def _sizes(layout: TrainerConfig) -> dict[str, int]:
    return {name: getattr(layout, name) for name in ("tp", "pp", "ep", "dp")}


def _remark(remark: Remark) -> Text:
    text = Text("conflict  " if remark.blocks else "note      ", style="bold red" if remark.blocks else "bold yellow")
    text.append(f"{remark.key}: found {remark.found}, expected {remark.expected}. {remark.remedy}", style="not bold")
    return text


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return values | ({"total": value.total} if isinstance(value, StepTime) else {})
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _gb(value: float) -> str:
    return "" if not value else f"{value / 1e9:.2f}" if value >= 5e6 else f"{value / 1e9:.2g}"


def _seconds(value: float) -> str:
    return f"{value:.3g}"


def _launches(time: StepTime) -> str:
    return f"{time.launches:.3g}" + (" (counts)" if time.host_bound else "")
