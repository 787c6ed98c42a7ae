"""A plan on a terminal: the verdict in words, then the model, its bytes and its times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from fp8rl.diagnose.plan import Plan
from fp8rl.diagnose.plan.verdict import by
from fp8rl.diagnose.report import Grade, graded, grid
from fp8rl.rl.experiment.budget.memory import PHASES, Phase

_PARTS = ("products", "quantization", "attention", "elementwise", "launches", "transfers", "optimizer", "bubble")
_MEMORY_OF_A_WORKSTATION = 64e9
"""Bytes. Who needs more does not train on a CPU, so the plan does not say what that would take."""


def rendered(plan: Plan) -> RenderableType:
    """Render the verdict, conflicts and notes, then the model, its bytes, its times and its decoding."""
    job, layout, on = plan.job, plan.job.layout, f"on {plan.gpus} x {plan.gpu.name}"
    grade: Grade = "good"
    end = f"the plan fits {on}"
    if not plan.ok:
        end, grade = f"the plan does not hold {on}", "bad"
    elif plan.slack < plan.needed_slack:
        end, grade = f"the plan fits {on} by calculation, but leaves less free than a real run needs", "warning"
    if job.engines and plan.decides == "trainer":
        end += f", and {job.engines * job.engine_tp} for engines"
    numerics = f"{job.numerics.mode} mode, trainer {job.numerics.trainer}, rollout {job.numerics.rollout}"
    cp = f" cp {layout.cp}" if layout.cp > 1 else ""
    engines = f"; engines of {_gpus(job.engine_tp)}" if job.engines else ""
    cache = f"{plan.kv_bytes:,} bytes of KV cache"
    if plan.state_bytes:
        cache += f", and {plan.state_bytes:,} of each sequence"
    model = [
        f"{plan.subject}: {plan.parameters:,} parameters, {plan.active_parameters:,} of them active for a token",
        f"  {plan.training_flops / 1e9:.3g} GFLOP a token at {job.length:,} tokens; {cache}",
        f"{plan.gpus} x {plan.gpu.name}, tp {layout.tp} pp {layout.pp} ep {layout.ep} dp {layout.dp}{cp}, {numerics}",
        f"  {job.rows:,} rows of {job.length:,} tokens a step, {job.micro_batches} micro-batches of "
        f"{job.micro_batch:,}{engines}",
    ]
    if plan.tower:
        model += [f"  the text of a {plan.tower}: its tower for pictures stays on disk, and is written back as it is"]
    model += [f"  {plan.assumed}"] if plan.assumed else []
    return Group(
        graded(end, grade),
        *_keys(plan),
        *map(Text, _sentences(plan)),
        *(remark.shown("conflict", "note") for remark in plan.remarks),
        Text(),
        Text("\n".join(model)),
        Text(),
        _memory(plan),
        Text(),
        _times(plan),
        Text(plan.efficiency.source, style="dim"),
        *((Text(), _decode(plan)) if plan.decode else ()),
    )


def _keys(plan: Plan) -> list[Text]:
    """Say what was found where keys were looked for."""
    if plan.keys is None:
        said = f"--fit found no keys with which it fits on {_gpus(plan.job.layout.world_size)}"
        return [Text(said)] if plan.searched else []
    if not plan.keys:
        return [Text("no key has to be set")]
    lost = "numerics.mode=native" in plan.keys
    why = "; native mode gives up d = 0, as on GPUs an exact engine has one rank" if lost and plan.job.engines else ""
    return [Text(f"with these keys{why}:"), Text("  " + " ".join(plan.keys), style="bold")]


def _sentences(plan: Plan) -> Iterator[str]:
    """Say what the plan takes and leaves free, and how fast it is."""
    job, has, gpu = plan.job, plan.gpu.memory, plan.gpu.name
    of_trainer, of_engine = (plan.memory[name].peak / 1e9 for name in ("trainer", "engine"))
    alone = "" if plan.decides == "trainer" else " alone"
    apart = f" (trainer{alone} {of_trainer:.1f}, engine{alone} {of_engine:.1f})" if job.engines else ""
    free = f"{plan.slack / 1e9:.1f} GB free ({plan.slack / has:.1%})"
    if plan.slack < 0:
        free = f"{-plan.slack / 1e9:.1f} GB short"
    needed = f"{plan.needed_slack / has:.0%}"
    yield (
        f"a GPU needs {(has - plan.slack) / 1e9:.1f} GB and has {has / 1e9:.1f}{apart}: {free}; "
        f"a real run needs {plan.needed_slack / 1e9:.1f} GB free ({needed})"
    )

    largest = plan.largest_micro_batch[plan.decides]
    if not largest:
        yield "not even the smallest micro-batch fits"
    elif not plan.largest_with_slack:
        yield f"no micro-batch leaves {needed} free; at most {largest:,} tokens fit"
    else:
        yield f"micro-batches of up to {plan.largest_with_slack:,} tokens leave {needed} free; at most {largest:,} fit"

    look = f"; {plan.gpus} with {' '.join(plan.fits_with)}" if plan.fits_with else ""
    if (layout := plan.fewest) is None:
        yield f"with these settings no number of {gpu} suffices for the trainer, whatever the layout{look}"
    else:
        beside = "" if plan.fewest_apart else " beside an engine"
        if plan.fewest_apart and plan.decides == "colocated":
            beside = ", with engines on their own GPUs"
        count = layout.world_size
        example = look or f" (for example tp {layout.tp} pp {layout.pp} ep {layout.ep} dp {layout.dp})"
        yield f"with these settings {_gpus(count)} suffice{'s' * (count == 1)} for the trainer{beside}{example}"

    if job.engines:
        sent, in_bf16 = (each / 1e9 for each in plan.sync_bytes)
        yield f"a sync sends {sent:.3g} GB to each engine ({in_bf16:.3g} in BF16)"
        one = ", and on GPUs exact mode runs with 1" if job.numerics.mode == "exact" else ""
        yield f"this model's largest rollout.tp is {plan.largest_engine_tp}{one}"
    speed = plan.tokens_per_second
    yield f"training processes {speed.low:,.0f} to {speed.high:,.0f} tokens per second and GPU"
    if job.fp8:
        yield _of_fp8(plan)
    if plan.on_a_cpu[1] < _MEMORY_OF_A_WORKSTATION:
        yield f"on CPUs a trainer rank's process would peak at {plan.on_a_cpu[1] / 1e9:.3g} GB"
    yield f"left out of these numbers: {'; '.join(plan.left_out)}"


def _of_fp8(plan: Plan) -> str:
    """Say how much faster or slower a step is in FP8, and from how many tokens on it is faster."""
    ratio, (slow, fast) = plan.fp8_over_bf16, plan.break_even
    said = {
        "FP8 is slower here": f"FP8 training is {by(ratio)} slower than BF16 here",
        "FP8 is faster here": f"FP8 training takes {by(ratio)} less time than BF16 here",
        "FP8 may be faster or slower here": f"FP8 training takes between {1 - ratio.low:.0%} less and "
        f"{ratio.high - 1:.0%} more time than BF16 here",
    }[plan.pays]
    if slow is None and fast is None:
        return f"{said}, at any batch size" if plan.pays == "FP8 is slower here" else said
    if slow == fast:
        return f"{said}; it is faster from {slow:,} tokens a step on"
    at_best = f"from {fast:,} tokens a step on at best" if fast else "never at best"
    return f"{said}; it is faster {at_best}, {f'from {slow:,} at worst' if slow else 'never at worst'}"


def _memory(plan: Plan) -> RenderableType:
    def row(name: RenderableType, held: Mapping[Phase, float]) -> tuple[RenderableType, ...]:
        return name, *(_gb(held.get(phase, 0.0)) for phase in PHASES)

    ours = plan.memory[plan.decides]
    rows = [row(name, held) for name, held in ours.held.items()]
    totals = {"colocated": "colocated", "trainer": "trainer alone", "engine": "engine alone"}
    sums = [
        (Text(title, style="bold"), plan.memory[name])
        for name, title in totals.items()
        if plan.job.engines or name == "trainer"
    ]
    if len(plan.stages) > 1:
        sums += [(Text(f"  trainer, stage {stage}"), memory) for stage, memory in enumerate(plan.stages)]
    rows += [row(name, {phase: memory.in_phase(phase) for phase in PHASES}) for name, memory in sums]
    beside = " beside an engine" if plan.decides == "colocated" else ""
    return grid((f"GB, rank {ours.rank}{beside}", *PHASES), rows, numbers=1)


def _times(plan: Plan) -> RenderableType:
    ours = "FP8" if plan.job.fp8 else "as planned"
    columns = [side[corner] for side in (plan.fp8, plan.bf16) for corner in ("slow", "fast")]
    rows: list[tuple[RenderableType, ...]] = []
    for part in _PARTS:
        counts = [" (counts)" if part == "launches" and time.host_bound else "" for time in columns]
        rows.append((part, *(f"{getattr(time, part):.3g}{note}" for time, note in zip(columns, counts, strict=True))))
    rows.append((Text("step", style="bold"), *(f"{time.total:.3g}" for time in columns)))
    headings = ("s a training step", f"{ours}, slow", f"{ours}, fast", "BF16, slow", "BF16, fast")
    return grid(headings, rows, numbers=1)


def _decode(plan: Plan) -> RenderableType:
    speeds = [f"tokens/s, {plan.job.numerics.mode} {each}" for each in (plan.job.numerics.rollout, "bf16")]
    rows = [
        ("an engine", str(side.batch), str(side.kernels), f"{side.tokens_per_second:,.0f}",
         f"{bf16.tokens_per_second:,.0f}", _gb(side.weights), _gb(side.cache))
        for side, bf16 in plan.decode
    ]  # fmt: skip
    return grid(("decoding", "answers", "kernels", *speeds, "weights read (GB)", "cache read (GB)"), rows)


def _gpus(number: int) -> str:
    return f"{number} GPU{'s' * (number != 1)}"


def _gb(value: float) -> str:
    return "" if not value else f"{value / 1e9:.2f}" if value >= 5e6 else f"{value / 1e9:.2g}"
