"""A plan: what a model or a spec needs on GPUs of one kind, calculated from its configuration alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fp8rl.diagnose.plan import layouts
from fp8rl.diagnose.plan.bench import DECODED, Decode, Rates, decode_step, read_bench
from fp8rl.diagnose.plan.search import dense_layers_in_bf16, keys_that_fit, written
from fp8rl.diagnose.plan.subject import PlanSubject, is_apart, job_on, read_plan_subject
from fp8rl.diagnose.plan.time import Part, StepTime, quotient, ratios, step_time
from fp8rl.diagnose.report import Finding, plain
from fp8rl.numerics.config import Mode, NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment.budget.fit import SLACK, fullest, largest_micro_batch, with_cache
from fp8rl.rl.experiment.budget.job import Gpu, Job
from fp8rl.rl.experiment.budget.memory import Memory, colocated_memory, engine_memory, peak_on_a_cpu, trainer_memory
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.megatron.model_checks import check_layout
from fp8rl.weight_sync.served import served_bytes


@dataclass(frozen=True)
class Plan:
    """The calculated bytes, and the times for which rates were measured."""

    subject: PlanSubject
    gpu: Gpu
    gpus: int
    """GPUs of the trainer. Engines with their own GPUs need `job.engines` * `job.engine_tp` more."""
    job: Job
    memory: Mapping[str, Memory]
    """Memory of the fullest GPU that holds both sides (`colocated`), only a `trainer` or only an `engine`."""
    decides: Literal["colocated", "trainer"]
    """The entry of `memory` that must fit."""
    slack: float
    """Bytes left free on the GPU of `decides`."""
    needed_slack: float
    """Bytes that a real run needs free."""
    fewest: TrainerSection | None
    """A layout on the fewest GPUs that leaves `needed_slack` free; None: there is none."""
    fewest_apart: bool
    """True if the layout in `fewest` shares no GPU with engines: they have their own GPUs, or there are no engines."""
    stages: tuple[Memory, ...]
    """The trainer's memory on the first rank of each pipeline stage."""
    on_a_cpu: tuple[float, float]
    """Peak bytes of a trainer rank on a machine without GPUs: of its tensors, and of its whole process."""
    largest_micro_batch: Mapping[str, int]
    """Tokens of the largest micro-batch that fits, `colocated` and with only the `trainer`."""
    largest_with_slack: int
    """Tokens of the largest micro-batch that leaves `needed_slack` free on the GPU of `decides`."""
    largest_engine_tp: int
    """The largest `rollout.tp` that divides the model."""
    sync_bytes: tuple[int, ...]
    """Bytes that a sync sends to each engine: in the spec's precision, and in BF16."""
    decode: tuple[tuple[Decode, Decode], ...]
    """A decode step for each batch size, in the spec's precision and in BF16, with answers of half a row."""
    rates: Rates | None
    """The rates in the file of `--bench`; None: no file was given, so no time is calculated."""
    steps: tuple[StepTime, ...]
    """The training step as planned, and in BF16, at the measured rates; empty without rates."""
    ratios: tuple[tuple[Part, Part], ...]
    """Times of exact mode and of a library for the same step; empty without rates and in native mode."""
    findings: tuple[Finding, ...]
    keys: tuple[str, ...] | None = None
    """The keys that a search set to make the plan fit; None: no search was made (`searched`), or no keys do."""
    searched: bool = False
    fits_with: tuple[str, ...] | None = None
    """Keys that would make a plan fit on as many GPUs; None: it fits already, or no keys do."""

    @property
    def ok(self) -> bool:
        return all(finding.grade != "error" for finding in self.findings)

    def facts(self) -> dict[str, Any]:
        """Return the plan as JSON values, with only the layout, batch and numerics of the job."""

        def sizes(layout: TrainerSection) -> dict[str, int]:
            return {name: getattr(layout, name) for name in ("tp", "pp", "ep", "dp")}

        def bytes_of(memory: Memory) -> dict[str, Any]:
            return {"rank": memory.rank, "held": memory.held, "peak": memory.peak}

        job = self.job
        values = {name: value for name, value in vars(self).items() if name not in ("subject", "findings")}
        values["fewest"] = None if self.fewest is None else sizes(self.fewest)
        values["memory"] = {name: bytes_of(memory) for name, memory in self.memory.items()}
        values["stages"] = [bytes_of(memory) for memory in self.stages]
        values["steps"] = [plain(step) | {"at_least": step.total} for step in self.steps]
        values["ratios"] = [{"sides": plain(sides), "ratio": quotient(*sides)} for sides in self.ratios]
        shape = job.shape
        values |= {
            "parameters": shape.parameters,
            "active_parameters": shape.active_parameters,
            "kv_bytes": shape.kv_bytes(job.numerics.kv_format.dtype.itemsize),
            "state_bytes": shape.request_bytes(),
            "training_flops": shape.training_flops(job.length),
            "tower": shape.sizes.tower,
            "assumed": self.subject.assumed,
        }
        values["job"] = {
            "layout": sizes(job.layout) | {name: getattr(job.layout, name) for name in ("cp", "micro_batch_tokens")},
            "numerics": job.numerics.to_dict(),
            **{name: getattr(job, name) for name in ("rows", "length", "micro_batches", "engines", "engine_tp")},
        }
        return values


def make_plan(
    subject: PlanSubject, gpu: Gpu, gpus: int | None = None, length: int | None = None, bench: Path | None = None
) -> Plan:
    """Plan a subject. bench: a file of measured rates. Without rates no time is calculated. Raises UserError: the
    layout does not divide the GPUs, no layout divides the model, or the bench cannot be read."""
    rates = None if bench is None else read_bench(bench)
    shape, job = subject.shape, job_on(subject, gpu, length)
    if not subject.engines_chosen:
        job = replace(job, engine_tp=layouts.engine_ranks(job, gpu))
    if subject.chosen:
        job = replace(job, layout=job.layout if gpus is None else layouts.on_gpus(job.layout, gpus))
        check_layout(shape, job.layout, QuantSpec.preset("bf16"))  # whether it divides, whatever is quantized
    else:
        job = layouts.choose(job, gpu, 8 if gpus is None else gpus)
    plan = _calculated(subject, job, gpu, rates)
    if plan.ok and plan.slack >= plan.needed_slack:
        return plan
    keys = keys_that_fit(subject, gpu, plan.gpus, length)
    return plan if keys is None else replace(plan, fits_with=tuple(written(keys)))


def fitted_plan(
    name: str | None,
    overrides: Sequence[str],
    gpu: Gpu,
    gpus: int | None = None,
    length: int | None = None,
    bench: Path | None = None,
) -> Plan:
    """Search for keys that make a spec or model fit. Return the plan with these keys; `Plan.keys` lists them. If no
    keys make it fit, return the plan of the spec as it is, with `Plan.keys` None. Raises UserError as
    `read_plan_subject` and `make_plan`."""
    subject = read_plan_subject(name, overrides)
    keys = keys_that_fit(subject, gpu, gpus, length)
    shown = dense_layers_in_bf16(subject, gpu) if keys is None else keys
    kept = [each for each in overrides if each.partition("=")[0] not in shown]
    subject = read_plan_subject(name, [*kept, *written(shown)])
    plan = make_plan(subject, gpu, gpus if keys is None else None, length, bench)
    return replace(plan, searched=True, keys=None if keys is None else tuple(written(keys)))


def _calculated(subject: PlanSubject, job: Job, gpu: Gpu, bench: Mapping[Mode, Rates] | None) -> Plan:
    apart = is_apart(subject.experiment, job)
    job = with_cache(job, subject.experiment, gpu.memory, apart)
    memory = {"colocated": colocated_memory(job), "trainer": trainer_memory(job), "engine": engine_memory(job)}
    decides: Literal["colocated", "trainer"] = "trainer" if apart else "colocated"
    full = fullest(job, apart)
    fewest = None if apart else layouts.fewest(job, gpu, beside_engine=True)
    shape, mode = job.shape, job.numerics.mode
    decode = tuple(_decoding(job)) if job.engines else ()
    steps = () if bench is None else tuple(step_time(each, bench[mode]) for each in (job, job.in_bf16())[: 1 + job.fp8])
    return Plan(
        subject=subject,
        gpu=gpu,
        gpus=job.layout.world_size,
        job=job,
        memory=memory,
        decides=decides,
        slack=gpu.memory - full.peak,
        needed_slack=SLACK * gpu.memory,
        fewest=fewest or layouts.fewest(job, gpu, beside_engine=False),
        fewest_apart=fewest is None,
        stages=tuple(trainer_memory(job, stage) for stage in range(job.layout.pp)),
        on_a_cpu=peak_on_a_cpu(replace(job, storage="torch")),
        largest_micro_batch={
            name: largest_micro_batch(job, memory[name], gpu.memory) for name in ("colocated", "trainer")
        },
        largest_with_slack=largest_micro_batch(job, memory[decides], gpu.memory, SLACK),
        largest_engine_tp=max(layouts.engine_widths(job), default=1),
        sync_bytes=tuple(served_bytes(shape, each.numerics.rollout_spec) for each in (job, job.in_bf16())),
        decode=decode,
        rates=None if bench is None else bench[mode],
        steps=steps,
        ratios=tuple(ratios(job, bench, decode, steps[0])) if bench and mode == "exact" else (),
        findings=tuple(layouts.findings(subject, job, gpu, full)),
    )


def _decoding(job: Job) -> Iterator[tuple[Decode, Decode]]:
    """Yield a decode step in the spec's precision and in BF16 for each batch of DECODED. An answer has half a row, or
    its share of the cache if that is less."""

    def step(numerics: NumericsConfig, batch: int) -> Decode:
        context, each = min(job.length / 2, job.kv_tokens / batch), numerics.kv_format.dtype.itemsize
        return decode_step(job.shape, numerics.rollout_spec, batch, context, job.engine_tp, numerics.mode, each)

    yield from ((step(job.numerics, batch), step(job.in_bf16().numerics, batch)) for batch in DECODED)
