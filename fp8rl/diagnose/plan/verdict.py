"""The verdict of a plan: whether FP8 pays, from how many tokens on, what `train` would refuse, and other remarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fp8rl.diagnose.plan import layouts
from fp8rl.diagnose.plan.efficiency import Efficiency, Rates
from fp8rl.diagnose.plan.subject import PlanSubject
from fp8rl.diagnose.plan.time import step_time
from fp8rl.diagnose.report import Remark
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.budget.fit import NO_ENGINE_FITS, SLACK, check_fits, largest_micro_batch
from fp8rl.rl.experiment.budget.gpus import Gpu
from fp8rl.rl.experiment.budget.job import Job
from fp8rl.rl.experiment.budget.memory import Memory, colocated_memory, engine_memory, trainer_memory
from fp8rl.rl.experiment.preconditions.model import check_teacher_layout
from fp8rl.rl.experiment.preconditions.rules import broken_rules
from fp8rl.rl.experiment.preconditions.target import Target

Pays = Literal["FP8 is slower here", "FP8 is faster here", "FP8 may be faster or slower here"]
FEWEST, MOST = 1 << 7, 1 << 27
"""Tokens of a step between which the break-even is looked for."""


@dataclass(frozen=True)
class Bracket:
    """A number at both corners of what is known of efficiency."""

    slow: float
    fast: float

    @property
    def low(self) -> float:
        return min(self.slow, self.fast)

    @property
    def high(self) -> float:
        return max(self.slow, self.fast)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def fp8_over_bf16(job: Job, gpu: Gpu, efficiency: Efficiency) -> Bracket:
    """Time of a training step in FP8 over the same in BF16; below 1 where FP8 is faster."""
    return Bracket(*(_ratio(job, gpu, rates) for rates in (efficiency.slow, efficiency.fast)))


def pays(ratio: Bracket) -> Pays:
    if ratio.low > 1:
        return "FP8 is slower here"
    return "FP8 is faster here" if ratio.high < 1 else "FP8 may be faster or slower here"


def by(ratio: Bracket) -> str:
    """Write how much more or less time than BF16 it takes, in percent; one number where both corners have the same."""
    least, most = (f"{each:.0%}" for each in sorted(abs(each - 1) for each in (ratio.low, ratio.high)))
    return least if least == most else f"{least} to {most}"


def break_even(job: Job, gpu: Gpu, efficiency: Efficiency) -> tuple[int | None, int | None]:
    """Tokens of a step from which on FP8 is faster, in the slow corner and in the fast one; None: from none on."""
    return _break_even(job, gpu, efficiency.slow), _break_even(job, gpu, efficiency.fast)


def stand_in(subject: PlanSubject) -> Iterator[Remark]:
    """Remark that a spec's model is not there yet, and name the config that stands in its place."""
    if subject.stands_in:
        yield Remark(
            False,
            "model.path",
            f"no {subject.experiment.model.path} yet",
            "the model's directory, when the run starts",
            f"Planned with the config of {subject.stands_in} that comes along; download the model before you train.",
        )


def refusals(subject: PlanSubject, job: Job, gpu: Gpu, memory: Memory) -> Iterator[Remark]:
    """Yield what `train` would refuse, by its own rules. memory: of the fullest GPU."""
    experiment = planned_experiment(subject.experiment, job)
    target = Target(gpus=True, transformer_engine=True, capability=gpu.capability)
    found = list(broken_rules(experiment, job.shape, target))
    try:
        if subject.teacher is not None:
            check_teacher_layout(experiment, subject.teacher)
        check_fits(job, memory, gpu.memory, gpu.name)
    except UserError as error:
        found.append(error)
    for each in found:
        yield Remark(True, each.key, each.found, each.expected, each.remedy)


def planned_experiment(experiment: Experiment, job: Job) -> Experiment:
    """The experiment in the layout of the job."""
    rollout = experiment.rollout.model_copy(update={"tp": job.engine_tp})
    return experiment.model_copy(update={"trainer": job.layout, "rollout": rollout})


def remarks(
    job: Job, gpu: Gpu, memory: Memory, ratio: Bracket, break_even: tuple[int | None, int | None]
) -> Iterator[Remark]:
    """Yield what speaks against a plan that `train` would accept.

    memory: of its fullest GPU. break_even: tokens of a step from which FP8 is faster, of both corners; None: never.
    """
    found = f"{memory.peak / 1e9:.1f} GB on {'an engine' if memory.rank is None else f'rank {memory.rank}'}"
    if memory.peak <= gpu.memory and not layouts.leaves_slack(memory.peak, gpu):
        yield Remark(
            False,
            "memory",
            f"{found} of the {gpu.memory / 1e9:.0f} GB of a {gpu.name}",
            f"{SLACK:.0%} of it free, as calculated peaks are right to about that, and memory fragments",
            _remedy(job, gpu, memory),
        )
    if pays(ratio) == "FP8 is slower here":
        found = f"fp8, with which a training step takes {by(ratio)} longer than in BF16"
        expected = "steps of more tokens: kernels and quantization take longer than products gain"
        remedy = "Raise trainer.micro_batch_tokens and the tokens of a step, or set numerics.trainer=bf16."
        if not any(break_even):
            expected = "BF16 for speed: kernels and quantization take longer than products gain, at any batch size"
            remedy = "Keep fp8 for equality, or set numerics.trainer=bf16."
        yield Remark(False, "numerics.trainer", found, expected, remedy)
    bf16 = colocated_memory(job.in_bf16()).peak
    if job.fp8 and memory.peak > bf16 and memory.rank is not None:
        yield Remark(
            False,
            "numerics.trainer",
            f"fp8, which takes {(memory.peak - bf16) / 1e9:+.1f} GB of the fullest GPU against BF16 on both sides",
            "no saving by FP8 in training: codes and their transposes are kept beside BF16 weights, or in their place",
            "Count on the engine's half and on activations alone.",
        )


def _remedy(job: Job, gpu: Gpu, memory: Memory) -> str:
    ways = []
    beside_engine = bool(memory.held.get("engine weights"))
    largest = largest_micro_batch(job, memory, gpu.memory, SLACK)
    if largest > job.length:
        ways.append(f"lower trainer.micro_batch_tokens to {largest}")
    elif beside_engine and layouts.leaves_slack(trainer_memory(job).peak, gpu):
        ways.append("give engines GPUs of their own (sync.transport=distributed)")
    if beside_engine and not layouts.leaves_slack(engine_memory(job).peak, gpu):
        ways.append(NO_ENGINE_FITS[job.numerics.mode])
    else:
        ways.append("take more GPUs, or more of trainer.ep, trainer.pp or trainer.tp")
    text = ", or ".join(ways)
    return text[0].upper() + text[1:] + "."


def _break_even(job: Job, gpu: Gpu, rates: Rates) -> int | None:
    """The least that is followed by no slower one, to a twelfth of an octave."""
    found, tokens = None, float(MOST)
    while tokens >= FEWEST:
        if _ratio(job.of_tokens(int(tokens)), gpu, rates) >= 1:
            break
        found, tokens = int(tokens), tokens / 2 ** (1 / 12)
    return found


def _ratio(job: Job, gpu: Gpu, rates: Rates) -> float:
    return step_time(job, gpu, rates).total / step_time(job.in_bf16(), gpu, rates).total
