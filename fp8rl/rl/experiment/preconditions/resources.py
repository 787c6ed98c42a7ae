"""Checks that this machine has what a run needs: memory for its processes and KV caches, and a free port."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from pathlib import Path

import psutil
import torch

from fp8rl.models.shape import Shape
from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.budget.fit import check_fits, fullest, own_gpu, planned_here
from fp8rl.rl.experiment.budget.job import Job
from fp8rl.rl.experiment.budget.memory import master_bytes, moved_bytes
from fp8rl.rollout.config import RolloutSection
from fp8rl.trainer.state_bytes import state_bytes
from fp8rl.weight_sync.served import served_bytes

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
SHARED_MEMORY, SHARED_BYTES = Path("/dev/shm"), 8 * 2**20
"""The folder of shared memory, and the most bytes that an engine keeps there."""
RANK_BYTES, ENGINE_BYTES = 250 * 2**20, 350 * 2**20
"""Bytes that a rank of the trainer, or of an engine, takes before it has a model (measured)."""


def kv_cache_bytes(shape: Shape, engines: RolloutSection, each: int) -> int:
    """Bytes of all engines' KV caches and sequence states on a CPU. each: bytes of a number in the cache."""
    tp, states = engines.tp, engines.states(cuda=False)
    of_rank = engines.cache_tokens * shape.kv_bytes(each, tp) + states * shape.request_bytes(tp)
    return engines.engines * tp * of_rank


def check_memory(shape: Shape, experiment: Experiment, teacher: Shape | None = None) -> None:
    """Check that a run fits into memory. On GPUs it counts all that `fp8rl plan` adds up. On CPUs it counts processes,
    the trainer's state, and the engines' weights and KV caches, but no activations. It checks no cluster's machines.

    teacher: the teacher's shape, if there is one.
    Raises UserError: the run does not fit.
    """
    if "RAY_ADDRESS" in os.environ:
        return
    if (gpu := own_gpu()) is not None:
        _check_shares(experiment, torch.cuda.device_count())
        job, apart = planned_here(shape, experiment, gpu)
        check_fits(job, fullest(job, apart), gpu)
        stages = range(experiment.trainer.pp)
        _check_processes(experiment, [_on_the_host(job, stage) for stage in stages], weights=0)
        return
    numerics, layout, rollout = experiment.numerics_config(), experiment.trainer, experiment.rollout
    firsts = [stage * layout.stage_size for stage in range(layout.pp)]  # a rank of each pipeline stage
    states = [state_bytes(shape, layout, numerics, "torch", rank).values() for rank in firsts]
    state = [sum(part.total for part in parts) for parts in states]
    element_bytes = numerics.kv_format.dtype.itemsize
    weights = rollout.tp * served_bytes(shape, numerics.rollout_spec, rollout.tp) if experiment.needs_engines else 0
    left = _check_processes(experiment, state, weights)
    if not experiment.needs_engines:
        return
    if teacher is not None and experiment.teacher is not None:
        its_own = experiment.teacher.numerics(experiment).kv_format.dtype.itemsize
        taken = kv_cache_bytes(teacher, experiment.teacher.engine(rollout), its_own)
        if taken > left:
            expected = f"a KV cache that fits the free memory: the teacher's would take {taken / 2**30:.1f} GiB, "
            expected += f"and the processes leave {left / 2**30:.1f} GiB"
            remedy = "Lower teacher.max_total_tokens or teacher.engines, or free memory."
            raise user_error("teacher.max_total_tokens", experiment.teacher.max_total_tokens, expected, remedy)
        left -= taken
    caches = kv_cache_bytes(shape, rollout, element_bytes)
    if caches > left:
        expected = f"a cache that fits the free memory: {rollout.engines} engine(s) would need "
        expected += f"{caches / 2**30:.1f} GiB, and the processes leave {left / 2**30:.1f} GiB"
        beside = rollout.engines * rollout.tp * rollout.states(cuda=False) * shape.request_bytes(rollout.tp)
        if 2 * beside > caches:
            remedy = f"Lower it: states of sequences alone take {beside / 2**30:.1f} GiB. Or free memory."
            raise user_error("rollout.max_running_requests", rollout.max_running_requests, expected, remedy)
        most = max(0, left - beside) // (rollout.engines * rollout.tp * shape.kv_bytes(element_bytes, rollout.tp))
        remedy = f"Set rollout.max_total_tokens well below {most}, or free memory."
        raise user_error("rollout.max_total_tokens", rollout.cache_tokens, expected, remedy)


def _check_processes(experiment: Experiment, states: list[int], weights: int) -> int:
    """Return the bytes that all processes leave. states: a rank's bytes, by stage. weights: an engine's bytes."""
    ranks, engines = experiment.trainer.world_size, experiment.engine_ranks
    available = available_memory()
    trainer = ranks * RANK_BYTES + ranks * sum(states) // len(states)
    serving = sum(engines) * ENGINE_BYTES + experiment.rollout.engines * weights
    processes = trainer + serving
    if processes > available:
        key, found = ("rollout.engines", len(engines)) if serving > trainer else ("trainer.dp", experiment.trainer.dp)
        expected = f"processes that fit the free memory: {ranks} trainer rank(s) and {len(engines)} engine(s) need "
        expected += f"more than {processes / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available"
        raise user_error(key, found, expected, f"Lower {key}, or submit the run to a Ray cluster that has the memory.")
    return available - processes


def check_shared_memory(experiment: Experiment) -> None:
    """Raise `UserError` if the machine's shared memory has no room for what an engine keeps there."""
    if "RAY_ADDRESS" in os.environ or not experiment.needs_engines:
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < SHARED_BYTES:
        expected = f"{SHARED_BYTES >> 20} MiB, for an engine"
        remedy = f"Remove what is left there (ls -l {SHARED_MEMORY}), or give the container more (docker run "
        remedy += "--shm-size=1g)."
        raise user_error(str(SHARED_MEMORY), f"{free / 2**20:.0f} MiB free", expected, remedy)


def _on_the_host(job: Job, stage: int) -> int:
    """Return the bytes of host memory that a rank with a GPU takes. If Adam runs on the host, count FP32 masters, two
    moments and gradients. If trainer and engines take turns, add the bytes that the rank moves to the host."""
    rank = stage * job.layout.stage_size
    turns = int(moved_bytes(job, rank)) if job.sleep else 0
    return turns + (4 * master_bytes(job, rank) if job.layout.optimizer.offload else 0)


def _check_shares(experiment: Experiment, gpus: int) -> None:
    """Refuse `rollout.sleep` if the trainer leaves GPUs, because engines then take these and share none with it."""
    ranks = experiment.trainer.world_size
    if experiment.rollout.sleep and experiment.needs_engines and gpus > ranks:
        expected = "as many ranks as GPUs: engines take free GPUs first, and an engine that sleeps there frees no "
        expected += "memory for the trainer"
        remedy = f"Have the trainer take all {gpus} (trainer.dp), let the run see fewer (CUDA_VISIBLE_DEVICES), "
        remedy += "or remove rollout.sleep."
        raise user_error("rollout.sleep", f"true with {gpus} GPUs for {ranks} trainer rank(s)", expected, remedy)


def available_memory() -> int:
    """Bytes that this process may still take: the machine's free memory, or less if one of its control groups (v2)
    limits it. Pages of files that were not read lately count as free, because the kernel can free them."""
    left = [psutil.virtual_memory().available]
    lines = OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.is_file() else []
    name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for group in (CGROUPS / name, *(CGROUPS / name).parents):  # from its own up to the root, which a container shows
        limit = group / "memory.max"
        if group.is_relative_to(CGROUPS) and limit.is_file() and limit.read_text().strip() != "max":
            most, used = (int((group / file).read_text()) for file in ("memory.max", "memory.current"))
            usage = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            left.append(max(0, most - used + int(usage.get("inactive_file", 0))))
    return min(left)


def check_port(rollout: RolloutSection) -> None:
    """Raise `UserError` if the port of the spec is taken, or if several engines would share it."""
    if rollout.port is None:
        return
    if rollout.engines > 1:
        expected = f"no fixed port for rollout.engines = {rollout.engines}: two engines cannot share one"
        remedy = "Remove rollout.port, so that each engine takes a free one."
        raise user_error("rollout.port", rollout.port, expected, remedy)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Ports in TIME_WAIT are free for a server that sets the same option; listening ones stay refused.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", rollout.port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            expected = "a free port: another server, perhaps another engine, listens on it"
            remedy = "Stop that server, choose another port, or remove rollout.port to take a free one."
            raise user_error("rollout.port", rollout.port, expected, remedy) from error
