"""The kernels of a run, compiled before it starts: `fp8rl warm`, and the start of a run on GPUs.

Which variants they are follows from the spec: a process of its own runs what a start tries, an engine's forwards, a
sync and a trainer's micro-batches on the meta device, and says which kernels their ops would launch.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fp8rl.models import load_architecture, read_model
from fp8rl.numerics.backend.implementation import implementation_for, using
from fp8rl.numerics.core.files import code_digest
from fp8rl.rl.experiment import Experiment, parse_experiment
from fp8rl.rl.experiment.sections import NumericsSection
from fp8rl.rl.run.cluster.placement import Node
from fp8rl.rl.run.engines.serving import engine_adapter, engine_config

if TYPE_CHECKING:
    from fp8rl.numerics.kernels.ahead import Variant

_PACKAGES = ("fp8rl.models", "fp8rl.numerics", "fp8rl.rollout", "fp8rl.trainer", "fp8rl.weight_sync")
_PARTS = ("model", "numerics", "rollout", "trainer", "adapter", "teacher", "sync")
"""Sections of a spec that kernels depend on."""


@dataclass(frozen=True)
class Warmed:
    """The kernels of a spec in the cache."""

    directory: str
    kernels: int
    compiled: int
    """Those that the cache lacked."""
    unknown: tuple[str, ...] = ()
    """Forms of ops whose kernels are compiled when an engine first launches them."""


def warm(experiment: Experiment | None, capability: tuple[int, int], say: Callable[[str], object]) -> Warmed | None:
    """Compile what GPUs of this compute capability lack in Triton's cache; None where no kernel of ours runs.

    It needs no GPU. experiment: None for what a start tries alone. say: told what is being compiled.

    Raises:
        RuntimeError: a kernel does not compile.
    """
    if not _has_kernels(experiment, capability):
        return None
    from fp8rl.numerics.kernels import ahead, cache

    if (message := cache.problem()) is not None:
        say(message)
    variants, unknown = _recorded(experiment, capability)
    with cache.alone():
        found = ahead.compile_all(variants, capability, len(os.sched_getaffinity(0)), say)
        cache.note_warm(_digest(experiment, capability))
    return Warmed(str(cache.directory()), len(variants), len(found.compiled), tuple(unknown))


def warm_once(experiment: Experiment | None, capability: tuple[int, int] | None, say: Callable[[str], object]) -> None:
    """Do so unless it was done for this spec and this code, or the run computes on CPUs.

    A start does not fail with it: what is not there is compiled when it is first launched, and `say` is told why.
    """
    if capability is None or not _has_kernels(experiment, capability):
        return
    from fp8rl.numerics.kernels import cache

    if not cache.is_warm(_digest(experiment, capability)):
        say(f"compiling kernels into {cache.directory()}, which lacks those of this spec")
        try:
            warm(experiment, capability, say)
        except RuntimeError as error:
            say(f"kernels: not compiled beforehand, but each when it is first launched; {error}")


def warm_nodes(
    experiment: Experiment, nodes: Mapping[Node, tuple[int, int] | None], say: Callable[[str], object]
) -> None:
    """Do so on each of the nodes of a run, by the compute capability of their GPUs."""
    wanted = {node: each for node, each in nodes.items() if each is not None and _has_kernels(experiment, each)}
    if not wanted:
        return
    if len(nodes) == 1:
        warm_once(experiment, next(iter(wanted.values())), say)
        return
    say(f"compiling kernels on {len(wanted)} nodes, where they lack those of this spec")
    task = ray.remote(num_cpus=0, max_retries=0)(_warm_here)
    values = experiment.to_dict()
    places = {node: NodeAffinitySchedulingStrategy(node.id, soft=False) for node in wanted}
    ray.get([task.options(scheduling_strategy=places[node]).remote(values, each) for node, each in wanted.items()])


def _warm_here(values: dict[str, Any], capability: tuple[int, int]) -> None:
    warm_once(parse_experiment(values), capability, print)


def _has_kernels(experiment: Experiment | None, capability: tuple[int, int]) -> bool:
    numerics = NumericsSection().config(tp=1) if experiment is None else experiment.numerics_config()
    return numerics.mode == "exact" and implementation_for(capability, numerics.spec) == "triton"


def _digest(experiment: Experiment | None, capability: tuple[int, int]) -> str:
    if experiment is None:
        return hashlib.sha256(json.dumps([code_digest(_PACKAGES), capability]).encode()).hexdigest()[:16]
    resolved = experiment.to_dict()
    config = (experiment.model.directory / "config.json").read_bytes()
    code = code_digest(_PACKAGES, experiment.model.architecture)
    text = json.dumps([code, capability, {part: resolved.get(part) for part in _PARTS}], sort_keys=True)
    return hashlib.sha256(config + text.encode()).hexdigest()[:16]


def _recorded(experiment: Experiment | None, capability: tuple[int, int]) -> tuple[list[Variant], list[str]]:
    """What `record` finds, in a process of its own."""
    from fp8rl.numerics.kernels.ahead import Variant

    # As on a machine without GPUs, which the process could otherwise take for those that it imagines.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-m", __name__],
        input=json.dumps([experiment and experiment.to_dict(), capability]),
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"kernels: found no list of what this spec launches: {done.stderr.strip()[-2000:]}")
    variants, unknown = json.loads(done.stdout.splitlines()[-1])
    return [Variant(*each) for each in variants], unknown


def record(experiment: Experiment | None, capability: tuple[int, int]) -> tuple[list[tuple[str, str]], list[str]]:
    """The variants of all kernels that a run launches, and the forms of ops that are not known. The process is good for
    nothing else afterwards."""
    from fp8rl.numerics.kernels.ahead import launch_probe, recorded

    if experiment is None:
        with recorded(capability) as found, using("triton"):
            launch_probe()
        return [(each.kernel, each.data) for each in found], []
    from fp8rl.rollout.plugin.ahead import launch_forwards
    from fp8rl.trainer.ahead import launch_step
    from fp8rl.weight_sync.ahead import launch_sync

    if experiment.model.architecture is not None:
        load_architecture(experiment.model.architecture)
    path, numerics, unknown = experiment.model.directory, experiment.numerics_config(), []
    with recorded(capability) as found, using("triton"):
        launch_probe()
        if experiment.needs_engines:
            with torch.no_grad():
                policy = read_model(path, served=True)
                unknown = launch_forwards(
                    policy, numerics, engine_config(experiment, "policy"), engine_adapter(experiment)
                )
                if (teacher := experiment.teacher) is not None:
                    served = read_model(teacher.directory, served=True)
                    of_teacher = teacher.numerics(experiment.numerics, experiment.trainer.tp)
                    unknown += launch_forwards(served, of_teacher, engine_config(experiment, "teacher"))
        launch_sync(read_model(path), numerics)
        trained = read_model(path).adapted(experiment.adapter)
        longest = experiment.rollout.context_length
        launch_step(path, trained, experiment.trainer, numerics, longest, experiment.rollout.truncation)
    return [(each.kernel, each.data) for each in found], unknown


if __name__ == "__main__":
    values, given = json.load(sys.stdin)
    answer, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(record(values and parse_experiment(values), (given[0], given[1]))), file=answer)
