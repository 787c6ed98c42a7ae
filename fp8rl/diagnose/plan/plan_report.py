"""The report of a plan: the model, its bytes, its times if rates were measured, and the verdict in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from fp8rl.diagnose.plan import Plan
from fp8rl.diagnose.plan.time import ASSUMED, quotient
from fp8rl.diagnose.report import Report, grid
from fp8rl.rl.experiment.budget.memory import PHASES, Phase

_MEMORY_OF_A_WORKSTATION = 64e9
"""The plan leaves out a CPU's need above this many bytes, because nobody trains on a CPU with more."""


def reported(plan: Plan) -> Report:
    """Make the report: the model, its bytes, its step and its decoding, the findings, and the verdict."""
    job, layout, on = plan.job, plan.job.layout, f"on {plan.gpus} x {plan.gpu.name}"
    end = f"the plan fits {on}"
    if not plan.ok:
        end = f"the plan cannot run {on}"
    elif plan.slack < plan.needed_slack:
        end = f"the plan fits {on} by calculation, but leaves less free than a real run needs"
    if job.engines and plan.decides == "trainer":
        end += f", and {job.engines * job.engine_tp} for engines"
    numerics = f"{job.numerics.mode} mode, trainer {job.numerics.trainer}, rollout {job.numerics.rollout}"
    cp = f" cp {layout.cp}" if layout.cp > 1 else ""
    engines = f"; engines of {_gpus(job.engine_tp)}" if job.engines else ""
    shape, name = job.shape, plan.subject.name
    cache = f"{shape.kv_bytes(job.numerics.kv_format.dtype.itemsize):,} bytes of KV cache"
    if state_bytes := shape.request_bytes():
        cache += f", and {state_bytes:,} of each sequence"
    model = [
        f"{name}: {shape.parameters:,} parameters, {shape.active_parameters:,} of them active for a token",
        f"  {shape.training_flops(job.length) / 1e9:.3g} GFLOP a token at {job.length:,} tokens; {cache}",
        f"{plan.gpus} x {plan.gpu.name}, tp {layout.tp} pp {layout.pp} ep {layout.ep} dp {layout.dp}{cp}, {numerics}",
        f"  {job.rows:,} rows of {job.length:,} tokens a step, {job.micro_batches} micro-batches of "
        f"{job.micro_batch:,}{engines}",
    ]
    if tower := shape.sizes.tower:  # of a checkpoint for pictures, too; it takes no GPU memory
        model += [f"  the text of a {tower}: its tower for pictures stays on disk, and is written back as it is"]
    model += [f"  {plan.subject.assumed}"] if plan.subject.assumed else []
    tables = [
        Text("\n".join(model)),
        _memory(plan),
        *((Group(_times(plan), Text(_NOT_IN_TIMES)),) if plan.steps else ()),
        *((_decode(plan),) if plan.decode else ()),
        *((Text("\n".join(_ratios(plan))),) if plan.ratios else ()),
        Text("\n".join(_sentences(plan))),
    ]
    return Report("plan", name, plan.findings, plan.facts(), tables=tuple(tables), verdict=end)


def _sentences(plan: Plan) -> Iterator[str]:
    """Say what the plan takes and leaves free, and which keys a search has found."""
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
    if plan.on_a_cpu[1] < _MEMORY_OF_A_WORKSTATION:
        yield f"on CPUs a trainer rank's process would peak at {plan.on_a_cpu[1] / 1e9:.3g} GB"

    if plan.keys:
        lost = "numerics.mode=native" in plan.keys and job.engines
        why = " (native mode gives up d = 0; on GPUs an exact engine has one rank)" if lost else ""
        yield f"with these keys{why}:\n  {' '.join(plan.keys)}"
    elif plan.searched:
        none = f"--fit found no keys with which it fits on {_gpus(job.layout.world_size)}"
        yield none if plan.keys is None else "no key has to be set"


def _memory(plan: Plan) -> RenderableType:
    def row(name: RenderableType, held: Mapping[Phase, float]) -> tuple[RenderableType, ...]:
        return name, *(_gb(held.get(phase, 0.0)) for phase in PHASES)

    ours = plan.memory[plan.decides]
    rows = [row(name, held) for name, held in ours.held.items()]
    sums = [
        (Text(name if name == "colocated" else f"{name} alone", style="bold"), memory)
        for name, memory in plan.memory.items()
        if plan.job.engines or name == "trainer"
    ]
    if len(plan.stages) > 1:
        sums += [(Text(f"  trainer, stage {stage}"), memory) for stage, memory in enumerate(plan.stages)]
    rows += [row(name, {phase: memory.in_phase(phase) for phase in PHASES}) for name, memory in sums]
    beside = " beside an engine" if plan.decides == "colocated" else ""
    return grid((f"GB, rank {ours.rank}{beside}", *PHASES), rows, numbers=1)


_NOT_IN_TIMES = (
    "not in these times: attention, transfers between GPUs, waits of pipeline stages, sampling, rewards, syncs, "
    "scoring, evaluations, checkpoints"
)


def _times(plan: Plan) -> RenderableType:
    steps, source = plan.steps, plan.rates.source if plan.rates else ""
    of_steps = [{part.name: part for part in step.parts} for step in steps]
    rows: list[tuple[RenderableType, ...]] = []
    for name in dict.fromkeys(name for parts in of_steps for name in parts):
        seconds = (_between(parts[name].seconds) if name in parts else "" for parts in of_steps)
        rests_on = dict.fromkeys(one for parts in of_steps if name in parts for one in parts[name].rests_on.split("; "))
        rows.append((name, *seconds, "; ".join(rests_on)))
    rows.append((Text("a step, at least", style="bold"), *(_between(step.total) for step in steps), source))
    names = ("FP8" if plan.job.fp8 else "as planned", "BF16")
    return grid(("s a training step", *names[: len(steps)], "rests on"), rows)


def _decode(plan: Plan) -> RenderableType:
    rows = []
    for side, bf16 in plan.decode:
        read = map(_gb, (side.weights, bf16.weights, side.cache))
        rows.append((f"{side.batch}", f"{side.context:,.0f}", f"{side.kernels}", *read))
    weights = [f"weights, {plan.job.numerics.mode} {each} (GB)" for each in (plan.job.numerics.rollout, "bf16")]
    return grid(("a decode step reads: answers", "tokens of each", "kernels", *weights, "cache (GB)"), rows, numbers=0)


def _ratios(plan: Plan) -> Iterator[str]:
    yield "exact mode's time / a library's"
    for ours, theirs in plan.ratios:
        yield f"{ours.name} / {theirs.name}: {_between(quotient(ours, theirs))}"
        for side in (ours, theirs):
            yield f"  {_between(side.seconds)}{' s' if side.seconds else ''}: {side.rests_on}"
    yield ASSUMED


def _between(ends: tuple[float, float] | None) -> str:
    if ends is None:
        return "not measured"
    low, high = (f"{end:,.0f}" if end >= 1000 else f"{end:.3g}" for end in ends)
    return low if low == high else f"{low} to {high}"


def _gpus(number: int) -> str:
    return f"{number} GPU{'s' * (number != 1)}"


def _gb(value: float) -> str:
    return "" if not value else f"{value / 1e9:.2f}" if value >= 5e6 else f"{value / 1e9:.2g}"
