"""Checks whether a run fits on GPUs of a given memory. If it does not, the error names the class of bytes that is too
large, and the key that makes the class smaller."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter

import torch

from fp8rl.models import read_shape
from fp8rl.models.shape import Shape
from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.experiment.budget.job import Gpu, Job, job_of, teacher_bytes
from fp8rl.rl.experiment.budget.memory import (
    PHASES,
    Memory,
    MemoryClass,
    activation_bytes,
    cache_bytes,
    colocated_memory,
    engine_memory,
    logit_bytes,
    trainer_memory,
)
from fp8rl.rl.experiment.experiment import Experiment, with_keys
from fp8rl.trainer.device import has_transformer_engine
from fp8rl.trainer.state_bytes import storage_on_gpus

SLACK = 0.10
"""Part of a GPU's memory that the calculated peak must leave free: measured peaks differ from calculated ones by up to
10% (tests/diagnose/plan/test_peak.py), and fragmentation of the allocator comes on top."""


def fullest(job: Job, apart: bool) -> Memory:
    """Return the memory of the fullest GPU of a run. apart: engines have GPUs of their own."""
    if not job.engines:
        return trainer_memory(job)
    if apart:
        return max(trainer_memory(job), engine_memory(job), key=lambda memory: memory.peak)
    return colocated_memory(job)


def with_cache(job: Job, experiment: Experiment, gpu_memory: float, apart: bool) -> Job:
    """Fill in the size of an engine's KV cache if the spec has none. The cache holds all tokens that can be in use at a
    time. If the slack would not stay free, the cache is smaller, but holds at least one row."""
    rollout = experiment.rollout
    if rollout.max_total_tokens is not None or not job.engines:
        return job
    rows = -(-job.rows * (rollout.staleness + 1) * rollout.oversample // job.engines)
    empty = replace(job, kv_tokens=0)
    beside = engine_memory(empty) if apart else colocated_memory(empty)
    room = int((gpu_memory * (1 - SLACK) - beside.peak) // cache_bytes(job))
    return replace(job, kv_tokens=max(rollout.context_length, min(int(rows) * rollout.context_length, room)))


def check_fits(job: Job, memory: Memory, gpu: Gpu) -> None:
    """Raise `UserError` if a run needs more memory than the fullest GPU has. memory: what it needs."""
    if memory.peak <= gpu.memory:
        return
    phase, short = max(PHASES, key=memory.in_phase), memory.peak - gpu.memory
    held = [(kept.bytes.get(phase, 0.0), kept.name, _cure(job, kept, gpu.memory)) for kept in memory.classes]
    able = sorted([(n, name, cure) for n, name, cure in held if n and cure], key=itemgetter(0, 1), reverse=True)
    # The largest class that is large enough and whose remedy is not costly; else the largest class.
    enough = [choice for choice in able if choice[0] >= short and not choice[2].costly]
    size, name, cure = (enough or able)[0]
    where = "an engine's GPU" if memory.rank is None else f"the GPU of rank {memory.rank}"
    more = " That alone is not enough." if size < short else ""
    found = f"{memory.peak / 1e9:.1f} GB on {where} ({phase}), of which {name} {size / 1e9:.1f} GB"
    remedy = f"{cure.remedy}{more} `fp8rl plan` lists all that a GPU holds, and with --fit looks for keys."
    raise user_error(cure.key, found, f"at most the {gpu.memory / 1e9:.1f} GB of a {gpu.name}", remedy)


def largest_micro_batch(job: Job, memory: Memory, gpu_memory: float, slack: float = 0.0) -> int:
    """Return the largest number of tokens of a micro-batch that fits on a GPU; 0: none fits.

    memory: the GPU's bytes with the job's micro-batch. slack: part of the GPU's memory that stays free. Only
    activations, and logits up to a chunk, grow with the tokens.
    """
    stage = (memory.rank or 0) // job.layout.stage_size
    logits = stage == job.layout.pp - 1
    per_token = activation_bytes(job, stage, 1)
    rest = memory.in_phase("train") - per_token * job.micro_batch - (logit_bytes(job) if logits else 0.0)
    free = gpu_memory * (1 - slack) - rest
    if any(memory.in_phase(phase) > gpu_memory * (1 - slack) for phase in PHASES if phase != "train"):
        return 0
    most = free // (per_token + (logit_bytes(job, 1) if logits else 0.0))
    chunk = job.layout.head_chunk_tokens * job.layout.cp
    if logits and most > chunk:  # more tokens have no more logits
        most = max(chunk, (free - logit_bytes(job, chunk + 1)) // per_token)
    return max(0, int(most))


@dataclass(frozen=True)
class Remedy:
    """A key that makes a class of bytes smaller."""

    key: str
    remedy: str
    costly: bool = False
    """True if the remedy needs more GPUs than the run has, or costs time in every step."""


def _cure(job: Job, held: MemoryClass, gpu_memory: float) -> Remedy | None:
    """Return the key that makes a class of bytes smaller; None if no key does."""
    layout, in_fp8 = job.layout, job.storage == "transformer_engine" and job.fp8
    match held.kind:
        case "teacher":
            return Remedy("teacher.path", "Take a smaller teacher, or give the run a GPU for its engine.", True)
        case "teacher's cache":
            return Remedy("teacher.max_total_tokens", "Lower teacher.max_total_tokens.")
        case "masters" | "moments" if not in_fp8 and not layout.optimizer.offload:
            return Remedy("trainer.optimizer.offload", "Set trainer.optimizer.offload=true.")
        case "moments" if layout.optimizer.moments == "fp32":
            return Remedy("trainer.optimizer.moments", "Set trainer.optimizer.moments=bf16.")
        case "masters" | "moments":
            return Remedy("trainer.dp", "Raise trainer.dp, whose ranks share masters and moments.", costly=True)
        case "state":
            keys = "trainer.ep, trainer.tp or trainer.pp" if job.shape.sizes.moe else "trainer.tp or trainer.pp"
            return Remedy(keys.partition(",")[0].partition(" or ")[0], f"Raise {keys}, which share the weights.", True)
        case "base":
            remedy = "Set it to false and use more GPUs: trainer ranks then share the weights. A base is on one GPU."
            return Remedy("sync.shared_base", remedy, costly=True)
        case "activations":
            return _cure_of_tokens(job, "trainer.recompute", "layer", layout.recompute != "layer")
        case "logits":
            return _cure_of_tokens(job, "trainer.head_chunk_tokens", "1024", layout.head_chunk_tokens > 1024)
        case "weights" if engine_memory(job).peak > gpu_memory:
            remedy = "Raise rollout.tp: an engine's rank does not fit by itself."
            if job.numerics.mode == "exact":
                remedy = "Set numerics.mode=native and raise rollout.tp: on GPUs an exact engine has one rank, which "
                remedy += "does not fit."
            return Remedy("rollout.tp", remedy, costly=True)
        case "weights" if job.may_sleep and not job.sleep:
            return Remedy(
                "rollout.sleep", "Set rollout.sleep=true, with which trainer and engines take turns.", costly=True
            )
        case "weights":
            remedy = "Set sync.transport=distributed, with which engines have GPUs of their own."
            return Remedy("sync.transport", remedy, costly=True)
        case "cache":
            return Remedy("rollout.max_total_tokens", "Lower rollout.max_total_tokens.")
        case "states":
            return Remedy("rollout.max_running_requests", "Lower rollout.max_running_requests.")
        case "graphs":
            return Remedy("rollout.graph_batches", "Lower the largest batch in rollout.graph_batches.")
        case "workspace":
            return Remedy("rollout.memory_fraction", "Raise it, or lower rollout.chunked_prefill_size.")
        case "buckets":
            return Remedy("sync.bucket_mib", "Lower sync.bucket_mib.")
        case "contexts":
            return Remedy("rollout.engines", "Lower rollout.engines.")
    return None


def _cure_of_tokens(job: Job, key: str, value: str, unset: bool) -> Remedy:
    """Return the remedy for activations or logits. If `key` is not set, it is `key`; else if a micro-batch holds
    several rows, it is smaller micro-batches; else it is more ranks."""
    if unset:
        return Remedy(key, f"Set {key}={value}.")
    if job.micro_batch > job.length:
        return Remedy("trainer.micro_batch_tokens", f"Lower trainer.micro_batch_tokens, down to rows of {job.length}.")
    remedy = "Raise trainer.tp or trainer.pp, or lower rollout.context_length: a micro-batch has only one row."
    return Remedy("trainer.tp", remedy, costly=True)


# The budget on this machine's GPUs, by which `train` refuses a run.


def own_gpu() -> Gpu | None:
    """Return the GPU that torch sees; None on a machine without GPUs. All GPUs of a machine are alike."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return Gpu(found.name, (found.major, found.minor), found.total_memory)


def planned_here(shape: Shape, experiment: Experiment, gpu: Gpu) -> tuple[Job, bool]:
    """Return the job of a step on this machine, with the KV cache that an engine gets; and whether the policy's engines
    have GPUs of their own. They do if the trainer leaves enough. The teacher's engines get GPUs after them."""
    storage = storage_on_gpus(experiment.numerics_config(), has_transformer_engine())
    job = job_of(experiment, shape, storage, gpu.memory)
    left = torch.cuda.device_count() - job.layout.world_size
    if experiment.teacher is not None and left < sum(experiment.engine_ranks):
        taught = read_shape(experiment.teacher.directory, "teacher.path")
        job = replace(job, teacher=teacher_bytes(experiment, taught, gpu.memory))
    # A shared base and its engine are on one GPU, even if others are left.
    room = left >= job.engines * job.engine_tp and not experiment.sync.shared_base
    apart = experiment.sync.engines_own_gpus or room
    return with_cache(job, experiment, gpu.memory, apart), apart


def with_own_cache(experiment: Experiment) -> Experiment:
    """Fill in the KV cache that an experiment's engines get on this machine's GPUs, if the spec sets no size."""
    gpu = own_gpu()
    if gpu is None or experiment.rollout.max_total_tokens is not None:
        return experiment
    job, _ = planned_here(read_shape(experiment.model.directory, adapter=experiment.adapter), experiment, gpu)
    return with_keys(experiment, {"rollout.max_total_tokens": job.kv_tokens})
