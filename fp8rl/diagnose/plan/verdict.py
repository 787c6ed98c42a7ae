"""The verdict of a plan: what `train` would refuse, and other remarks."""

from __future__ import annotations

from collections.abc import Iterator

from fp8rl.diagnose.plan import layouts
from fp8rl.diagnose.plan.subject import PlanSubject
from fp8rl.diagnose.report import Remark
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment.budget.fit import NO_ENGINE_FITS, SLACK, check_fits, largest_micro_batch
from fp8rl.rl.experiment.budget.job import Gpu, Job
from fp8rl.rl.experiment.budget.memory import Memory, colocated_memory, engine_memory, trainer_memory
from fp8rl.rl.experiment.preconditions.model import check_teacher_layout
from fp8rl.rl.experiment.preconditions.rules import Target, broken_rules


def refusals(subject: PlanSubject, job: Job, gpu: Gpu, memory: Memory) -> Iterator[Remark]:
    """Yield what `train` would refuse, by its own rules. memory: of the fullest GPU."""
    rollout = subject.experiment.rollout.model_copy(update={"tp": job.engine_tp})
    experiment = subject.experiment.model_copy(update={"trainer": job.layout, "rollout": rollout})
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


def remarks(subject: PlanSubject, job: Job, gpu: Gpu, memory: Memory) -> Iterator[Remark]:
    """Yield what speaks against a plan that `train` would accept. memory: of its fullest GPU."""
    if subject.stands_in:
        yield Remark(
            False,
            "model.path",
            f"no {subject.experiment.model.path} yet",
            "the model's directory, when the run starts",
            f"Planned with the config of {subject.stands_in} that comes along; download the model before you train.",
        )
    found = f"{memory.peak / 1e9:.1f} GB on {'an engine' if memory.rank is None else f'rank {memory.rank}'}"
    if memory.peak <= gpu.memory and not layouts.leaves_slack(memory.peak, gpu):
        yield Remark(
            False,
            "memory",
            f"{found} of the {gpu.memory / 1e9:.0f} GB of a {gpu.name}",
            f"{SLACK:.0%} of it free, as calculated peaks are right to about that, and memory fragments",
            _remedy(job, gpu, memory),
        )
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
