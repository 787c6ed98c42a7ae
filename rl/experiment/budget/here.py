"""The budget on this machine's GPUs: what `train` goes by."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fp8rl.models import read_shape
from fp8rl.models.shape import Shape
from fp8rl.rl.experiment.budget.fit import with_cache
from fp8rl.rl.experiment.budget.job import Job, job_of, teacher_bytes
from fp8rl.rl.experiment.experiment import Experiment
from fp8rl.trainer.device import has_transformer_engine
from fp8rl.trainer.state_bytes import storage_on


@dataclass(frozen=True)
class OwnGpu:
    """One of this machine's GPUs, which are alike. memory: bytes of it. count: of them."""

    name: str
    memory: int
    count: int


def own_gpu() -> OwnGpu | None:
    """What torch sees; None on a machine without."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return OwnGpu(found.name, found.total_memory, torch.cuda.device_count())


def planned_here(shape: Shape, experiment: Experiment, gpu: OwnGpu) -> tuple[Job, bool]:
    """The job of a step here, with the KV cache that an engine gets; and whether the policy's engines have GPUs of
    their own, as they do where enough are left. The teacher's come after them."""
    storage = storage_on(experiment.numerics_config(), True, has_transformer_engine())
    job = job_of(experiment, shape, storage, gpu.memory)
    left = gpu.count - job.layout.world_size
    if experiment.teacher is not None and left < sum(experiment.engine_ranks):
        taught = read_shape(experiment.teacher.directory, "teacher.path")
        job = replace(job, teacher=teacher_bytes(experiment, taught, gpu.memory))
    apart = experiment.sync.engines_own_gpus or left >= job.engines * job.engine_tp
    return with_cache(job, experiment, gpu.memory, apart), apart


def with_own_cache(experiment: Experiment) -> Experiment:
    """The experiment with the KV cache that its engines get here, where the spec leaves it open and there is a GPU."""
    gpu = own_gpu()
    if gpu is None or experiment.rollout.max_total_tokens is not None:
        return experiment
    tokens = planned_here(read_shape(experiment.model.directory, adapter=experiment.adapter), experiment, gpu)[
        0
    ].kv_tokens
    return experiment.model_copy(update={"rollout": experiment.rollout.model_copy(update={"max_total_tokens": tokens})})
