"""A plan as tables for people and as JSON for machines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fp8rl.diagnose.doctor.judge import Remark
from fp8rl.diagnose.plan.plan import Plan
from fp8rl.diagnose.plan.time import StepTime
from fp8rl.diagnose.plan.verdict import by
from fp8rl.diagnose.report import SCHEMA
from fp8rl.rl.experiment.budget.memory import PHASES
from fp8rl.trainer.config import TrainerSection

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
    """The verdict in words, then what it rests on: the model, its bytes, its times."""
    parts: Iterable[RenderableType] = (
        *_verdict(plan),
        *map(_remark, plan.remarks),
        Text(),
        _heading(plan),
        Text(),
        _memory(plan),
        Text(),
        _times(plan),
        Text(plan.efficiency.source, style="dim"),
        *((Text(), _decode(plan)) if plan.decode else ()),
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
        *([f"  {plan.assumed}"] if plan.assumed else []),
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
    job, layout = plan.job, plan.job.layout
    on = f"on {plan.gpus} x {plan.gpu.name}"
    if not plan.ok:
        end, style = f"the plan does not hold {on}", "bold red"
    elif plan.slack < plan.needed_slack:
        end, style = f"the plan fits {on} by calculation, but leaves less free than a real run needs", "bold yellow"
    else:
        end, style = f"the plan fits {on}", "bold green"
    lines = [_of_memory(plan), _of_micro_batches(plan), _gpus_that_would_do(plan)]
    if job.engines:
        sent, in_bf16 = (each / 1e9 for each in plan.sync_bytes)
        lines.append(f"a sync sends {sent:.3g} GB to each engine ({in_bf16:.3g} in BF16)")
    speed = plan.tokens_per_second
    lines.append(f"a GPU trains {speed.low:,.0f} to {speed.high:,.0f} tokens a second while it trains")
    lines += [_of_fp8(plan)] if job.fp8 else []
    lines.append(f"on CPUs a trainer rank's process would peak at {plan.on_a_cpu[1] / 1e9:.3g} GB")
    lines.append(f"left out of these numbers: {'; '.join(plan.left_out)}")
    ranks = f", and {job.engines * job.engine_tp} for engines" if job.engines and plan.decides == "trainer" else ""
    return [Text(end + ranks, style=style), *_keys(plan, layout.world_size), *map(Text, lines)]


def _keys(plan: Plan, world: int) -> list[Text]:
    """What was found where keys were looked for."""
    if plan.keys is None:
        return [Text(f"--fit found no keys with which it fits on {world} GPUs")] if plan.searched else []
    if not plan.keys:
        return [Text("nothing has to be set")]
    lost = "numerics.mode=native" in plan.keys
    why = "; native mode gives up d = 0, as on GPUs an exact engine has one rank" if lost and plan.job.engines else ""
    return [Text(f"with these keys{why}:"), Text("  " + " ".join(plan.keys), style="bold")]


def _of_memory(plan: Plan) -> str:
    has, (of_trainer, of_engine) = plan.gpu.memory, (plan.memory[name].peak / 1e9 for name in ("trainer", "engine"))
    alone = "" if plan.decides == "trainer" else " alone"
    apart = f" (trainer{alone} {of_trainer:.1f}, engine{alone} {of_engine:.1f})" if plan.job.engines else ""
    free = f"{plan.slack / 1e9:.1f} GB free ({plan.slack / has:.1%})"
    if plan.slack < 0:
        free = f"{-plan.slack / 1e9:.1f} GB short"
    wanted = f"a real run needs {plan.needed_slack / 1e9:.1f} GB free ({plan.needed_slack / has:.0%})"
    return f"needs {(has - plan.slack) / 1e9:.1f} GB, has {has / 1e9:.1f}{apart}: {free}; {wanted}"


def _of_micro_batches(plan: Plan) -> str:
    largest, free = plan.largest_micro_batch[plan.decides], f"{plan.needed_slack / plan.gpu.memory:.0%}"
    if not largest:
        return "no micro-batch fits, of however few tokens"
    if not plan.largest_with_slack:
        return f"no micro-batch leaves {free} free; at most {largest:,} tokens fit"
    return f"micro-batches of up to {plan.largest_with_slack:,} tokens leave {free} free; at most {largest:,} fit"


def _of_fp8(plan: Plan) -> str:
    """How much faster or slower a step is in FP8, and from how many tokens on it is faster."""
    ratio, (slow, fast) = plan.fp8_over_bf16, plan.break_even
    if plan.pays == "FP8 is slower here":
        said = f"FP8 training is {by(ratio)} slower than BF16 here"
    elif plan.pays == "FP8 is faster here":
        said = f"FP8 training takes {by(ratio)} less time than BF16 here"
    else:
        said = f"FP8 training takes between {1 - ratio.low:.0%} less and {ratio.high - 1:.0%} more time than BF16 here"
    if slow is None and fast is None:
        return f"{said}, at any batch size" if plan.pays == "FP8 is slower here" else said
    if slow == fast:
        return f"{said}; it is faster from {slow:,} tokens a step on"
    at_best = f"from {fast:,} tokens a step on at best" if fast else "never at best"
    return f"{said}; it is faster {at_best}, {f'from {slow:,} at worst' if slow else 'never at worst'}"


def _gpus_that_would_do(plan: Plan) -> str:
    layout, beside = plan.fewest, "" if plan.fewest_apart else " beside an engine"
    look = f"; {plan.gpus} with {' '.join(plan.fits_with)}" if plan.fits_with else ""
    if layout is None:
        return f"as it stands no number of {plan.gpu.name} would do for the trainer, whatever the layout{look}"
    if plan.fewest_apart and plan.decides == "colocated":
        beside = ", with engines on GPUs of their own"
    sizes = " ".join(f"{name} {size}" for name, size in _sizes(layout).items())
    return f"as it stands {layout.world_size} GPUs would do for the trainer{beside}{look or f' (for example {sizes})'}"


def _sizes(layout: TrainerSection) -> dict[str, int]:
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
