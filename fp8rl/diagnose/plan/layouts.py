"""Lists the layouts of a trainer on a number of GPUs, chooses one, and judges a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fp8rl.diagnose.plan.subject import PlanSubject, is_apart
from fp8rl.diagnose.report import Finding
from fp8rl.models.shape import Shape
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment import with_keys
from fp8rl.rl.experiment.budget.fit import SLACK, check_fits, fullest, largest_micro_batch
from fp8rl.rl.experiment.budget.job import GPUS_PER_NODE, Gpu, Job
from fp8rl.rl.experiment.budget.memory import Memory, colocated_memory, engine_memory, trainer_memory
from fp8rl.rl.experiment.preconditions.model import check_teacher_layout
from fp8rl.rl.experiment.preconditions.rules import Target, broken_rules
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.megatron.model_checks import check_engine_layout, check_layout

MOST_STAGES, MOST_EXPERT_RANKS = 32, 64
MOST_GPUS = 4096


def on_gpus(layout: TrainerSection, gpus: int) -> TrainerSection:
    """Return the layout with as many replicas as the GPUs allow. Raises UserError if it does not divide the GPUs."""
    each = layout.tp * layout.pp * layout.cp
    if gpus % each:
        expected = f"a multiple of trainer.tp * trainer.pp * trainer.cp = {layout.tp} * {layout.pp} * {layout.cp}"
        raise user_error("--gpus", gpus, expected, f"Give {max(1, gpus // each) * each}, or change the layout.")
    return layout.model_copy(update={"dp": gpus // each})


def engine_ranks(job: Job, gpu: Gpu) -> int:
    """Return the fewest ranks at which an engine takes less than half of each GPU, or else the most. Exact mode: 1."""
    if job.numerics.mode == "exact":
        return 1
    able = [ranks for ranks in engine_widths(job) if ranks <= GPUS_PER_NODE]
    light = [ranks for ranks in able if 2 * engine_memory(replace(job, engine_tp=ranks)).always < gpu.memory]
    return min(light, default=max(able, default=1))


def engine_widths(job: Job) -> list[int]:
    """Return the divisors of the number of heads that are possible numbers of ranks for an engine."""
    shape, blocks, mode = job.shape, job.numerics.blocks_spec, job.numerics.mode
    divisors = _divisors(shape.sizes.heads, shape.sizes.heads)
    return [ranks for ranks in divisors if accepted(check_engine_layout, shape, ranks, blocks, mode)]


def choose(job: Job, gpu: Gpu, gpus: int) -> Job:
    """Return the job in the layout that divides the model least among those that leave `SLACK` next to an engine. If
    none does, return it in the layout that takes the least memory.

    Raises UserError: no layout lets the model be quantized by its spec.
    """
    blocks = job.numerics.blocks_spec
    candidates = [replace(job, layout=layout) for layout in layouts(job.shape, job.layout, gpus, blocks)]
    if not candidates:  # not even the plainest one, which says why
        check_layout(job.shape, job.layout, blocks)
        raise AssertionError("found no layout, expected the plainest one to be refused")
    fitting = (each for each in candidates if leaves_slack(colocated_memory(each).peak, gpu))
    return next(fitting, None) or min(candidates, key=lambda each: colocated_memory(each).peak)


def leaves_slack(peak: float, gpu: Gpu) -> bool:
    return peak <= gpu.memory * (1 - SLACK)


def fewest(job: Job, gpu: Gpu, *, beside_engine: bool) -> TrainerSection | None:
    """Return a layout on the fewest GPUs (1, 2, 4, ... `MOST_GPUS`) that leaves `SLACK`; None: there is none."""
    if beside_engine and not leaves_slack(engine_memory(job).peak, gpu):
        return None
    gpus, needed = 1, colocated_memory if beside_engine else trainer_memory
    while gpus <= MOST_GPUS:
        for layout in layouts(job.shape, job.layout, gpus, job.numerics.blocks_spec):
            if leaves_slack(needed(replace(job, layout=layout)).peak, gpu):
                return layout
        gpus *= 2
    return None


def layouts(shape: Shape, base: TrainerSection, gpus: int, spec: QuantSpec) -> Iterator[TrainerSection]:
    """Yield all layouts of the model on the GPUs, the least divided first; tensor parallelism stays within a node."""
    sizes = shape.sizes
    for tp in _divisors(gpus, GPUS_PER_NODE):
        for pp in _divisors(gpus // tp, min(MOST_STAGES, sizes.layers)):
            for ep in _divisors(sizes.experts, MOST_EXPERT_RANKS) if sizes.moe else [1]:
                layout = base.model_copy(update={"tp": tp, "pp": pp, "ep": ep, "dp": gpus // tp // pp, "cp": 1})
                if accepted(check_layout, shape, layout, spec):
                    yield layout


def accepted(check: Callable[..., object], *values: Any) -> bool:
    """Return whether a check raises no `UserError` for these values."""
    try:
        check(*values)
    except UserError:
        return False
    return True


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]


def target(gpu: Gpu) -> Target:
    """Return what the rules ask of a machine with such GPUs."""
    return Target(gpus=True, transformer_engine=True, capability=gpu.capability)


def findings(subject: PlanSubject, job: Job, gpu: Gpu, memory: Memory) -> Iterator[Finding]:
    """Yield what `train` would refuse, then remarks on what it would accept. memory: the fullest GPU's."""
    experiment = with_keys(subject.experiment, {"trainer": job.layout, "rollout.tp": job.engine_tp})
    yield from map(Finding.of_error, broken_rules(experiment, job.shape, target(gpu)))
    try:
        if subject.teacher is not None:
            check_teacher_layout(experiment, subject.teacher)
        check_fits(job, memory, gpu)
    except UserError as error:
        yield Finding.of_error(error)
    if subject.stands_in:
        found, expected = f"no {subject.experiment.model.path} yet", "the model's directory before the run starts"
        remedy = f"Planned with the packaged config of {subject.stands_in}; download the model before you train."
        yield Finding("model.path", found, expected, remedy, "note")
    found = f"{memory.peak / 1e9:.1f} GB on {'an engine' if memory.rank is None else f'rank {memory.rank}'}"
    if memory.peak <= gpu.memory and not leaves_slack(memory.peak, gpu):
        found += f" of the {gpu.memory / 1e9:.0f} GB of a {gpu.name}"
        expected = f"{SLACK:.0%} of it free, because a peak can be that much higher than calculated"
        tokens = largest_micro_batch(job, memory, gpu.memory, SLACK)
        lower = f"Lower trainer.micro_batch_tokens to {tokens}, or let" if tokens > job.length else "Let"
        yield Finding("memory", found, expected, f"{lower} --fit look for keys.", "note")
    bf16 = fullest(job.in_bf16(), is_apart(subject.experiment, job)).peak
    if job.fp8 and memory.peak > bf16 and memory.rank is not None:
        found = f"fp8, which takes {(memory.peak - bf16) / 1e9:+.1f} GB of the fullest GPU against BF16 on both sides"
        expected = "no saving by FP8 in training, because codes and their transposes are kept beside BF16 weights"
        remedy = f"FP8 saves memory only in {'the engine and in ' if job.engines else ''}activations."
        yield Finding("numerics.trainer", found, expected, remedy, "note")
