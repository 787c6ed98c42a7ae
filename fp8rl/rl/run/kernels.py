"""The kernels of a run or of a served model, compiled before it starts: `fp8rl warm`, and each start on GPUs.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fp8rl.models import load_architecture, read_model
from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics.backend.implementation import implementation_for, using
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.code import code_digest
from fp8rl.rl.experiment import Experiment, parse_experiment
from fp8rl.rl.experiment.sections import NumericsSection
from fp8rl.rl.run.cluster.placement import Node
from fp8rl.rl.run.engines.serving import engine_adapter, engine_config
from fp8rl.rollout.config import RolloutSection

if TYPE_CHECKING:
    from fp8rl.numerics.kernels.precompile import Variant

_PACKAGES = ("fp8rl.models", "fp8rl.numerics", "fp8rl.rollout", "fp8rl.trainer", "fp8rl.weight_sync")
_PARTS = ("model", "numerics", "rollout", "trainer", "adapter", "teacher", "sync")
"""Sections of a spec that kernels depend on."""


@dataclass(frozen=True)
class ServedModel:
    """A model that one engine computes, of a run or by itself."""

    path: Path
    """A Hugging Face directory."""
    numerics: NumericsConfig
    rollout: RolloutSection
    adapter: AdapterSection | None = None
    """Beside its weights."""
    architecture: str | None = None
    """A user's file that has the model's."""

    def to_dict(self) -> dict[str, Any]:
        """Return the model as JSON values."""
        return {
            "path": str(self.path),
            "numerics": self.numerics.to_dict(),
            "rollout": self.rollout.model_dump(mode="json"),
            "adapter": self.adapter and self.adapter.model_dump(mode="json"),
            "architecture": self.architecture,
        }

    @classmethod
    def of(cls, values: dict[str, Any]) -> ServedModel:
        """Read what `to_dict` wrote."""
        return cls(
            Path(values["path"]),
            NumericsConfig.from_dict(values["numerics"]),
            RolloutSection.model_validate(values["rollout"]),
            values["adapter"] and AdapterSection.model_validate(values["adapter"]),
            values["architecture"],
        )


Subject = Experiment | ServedModel | None
"""What kernels are compiled for: a run, an engine by itself, or, None, what a start tries alone."""


@dataclass(frozen=True)
class Warmed:
    """The kernels of a spec in the cache."""

    directory: str
    kernels: int
    compiled: int
    """Those that the cache lacked."""
    unknown: tuple[str, ...] = ()
    """Forms of ops whose kernels are compiled when an engine first launches them."""


def warm(subject: Subject, capability: tuple[int, int], say: Callable[[str], object]) -> Warmed | None:
    """Compile what GPUs of this compute capability lack in Triton's cache; None where no kernel of ours runs.

    It needs no GPU. say: told what is being compiled.

    Raises:
        RuntimeError: a kernel does not compile.
    """
    if not _has_kernels(subject, capability):
        return None
    from fp8rl.numerics.kernels import cache, precompile

    if (message := cache.problem()) is not None:
        say(message)
    variants, unknown = _recorded(subject, capability)
    with cache.alone():
        found = precompile.compile_all(variants, capability, len(os.sched_getaffinity(0)), say)
        cache.note_warm(_digest(subject, capability))
    return Warmed(str(cache.directory()), len(variants), len(found.compiled), tuple(unknown))


def warm_once(subject: Subject, capability: tuple[int, int] | None, say: Callable[[str], object]) -> None:
    """Compile the kernels of a subject (`warm`) unless that was done for this code, or it computes on CPUs.

    A start does not fail with it: what is not there is compiled when it is first launched, and `say` is told why.
    """
    if capability is None or not _has_kernels(subject, capability):
        return
    from fp8rl.numerics.kernels import cache

    if not cache.is_warm(_digest(subject, capability)):
        say(f"compiling kernels into {cache.directory()}, which lacks some of those that are needed")
        try:
            warm(subject, capability, say)
        except RuntimeError as error:
            say(f"kernels: not compiled beforehand, but each when it is first launched; {error}")


def warm_nodes(
    experiment: Experiment, nodes: Mapping[Node, tuple[int, int] | None], say: Callable[[str], object]
) -> None:
    """Compile the kernels of a run (`warm_once`) on each of its nodes, by the compute capability of their GPUs."""
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


def _has_kernels(subject: Subject, capability: tuple[int, int]) -> bool:
    return implementation_for(capability, _numerics(subject).spec) == "triton"


def _numerics(subject: Subject) -> NumericsConfig:
    if isinstance(subject, Experiment):
        return subject.numerics_config()
    return NumericsSection().config(tp=1) if subject is None else subject.numerics


def _digest(subject: Subject, capability: tuple[int, int]) -> str:
    code: list[Any] = [code_digest(_PACKAGES, _architecture(subject)), capability]
    if isinstance(subject, ServedModel):
        code += [subject.to_dict(), (subject.path / "config.json").read_text()]
    elif subject is not None:
        resolved, needs = subject.to_dict(), subject.algorithm.needs
        parts = {part: resolved.get(part) for part in _PARTS}
        code += [parts, needs.reference, needs.critic, (subject.model.directory / "config.json").read_text()]
    return hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()[:16]


def _architecture(subject: Subject) -> str | None:
    if isinstance(subject, Experiment):
        return subject.model.architecture
    return None if subject is None else subject.architecture


def _recorded(subject: Subject, capability: tuple[int, int]) -> tuple[list[Variant], list[str]]:
    """Call `record` in a process of its own."""
    from fp8rl.numerics.kernels.precompile import Variant

    # As on a machine without GPUs, which the process could otherwise take for those that it imagines.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-m", __name__],
        input=json.dumps([isinstance(subject, Experiment), subject and subject.to_dict(), capability]),
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"kernels: found no list of what is launched: {done.stderr.strip()[-2000:]}")
    variants, unknown = json.loads(done.stdout.splitlines()[-1])
    return [Variant(*each) for each in variants], unknown


def record(subject: Subject, capability: tuple[int, int]) -> tuple[list[tuple[str, str]], list[str]]:
    """The variants of all kernels that are launched, and the forms of ops that are not known. The process is good for
    nothing else afterwards."""
    from fp8rl.numerics.kernels.precompile import launch_probe, recorded

    if (architecture := _architecture(subject)) is not None:
        load_architecture(architecture)
    unknown: list[str] = []
    with recorded(capability) as found, using("triton"):
        if (numerics := _numerics(subject)).mode == "exact":
            launch_probe(numerics.kv_format)
        if isinstance(subject, Experiment):
            unknown = _launch_run(subject)
        elif subject is not None:
            unknown = _launch_engine(subject)
    return [(each.kernel, each.data) for each in found], unknown


def _launch_run(experiment: Experiment) -> list[str]:
    from fp8rl.trainer.launches import launch_step
    from fp8rl.weight_sync.launches import launch_sync

    path, numerics, unknown = experiment.model.directory, experiment.numerics_config(), []
    if experiment.needs_engines:
        rollout, adapter = engine_config(experiment, "policy"), engine_adapter(experiment)
        unknown = _launch_engine(ServedModel(path, numerics, rollout, adapter))
        if (teacher := experiment.teacher) is not None:
            of_teacher = teacher.numerics(experiment.numerics, experiment.trainer.tp)
            unknown += _launch_engine(ServedModel(teacher.directory, of_teacher, engine_config(experiment, "teacher")))
    launch_sync(read_model(path), numerics)
    launch_step(
        path,
        read_model(path).adapted(experiment.adapter),
        experiment.trainer,
        numerics,
        experiment.rollout.context_length,
        experiment.rollout.truncation,
        reference=experiment.algorithm.needs.reference,
        critic=experiment.algorithm.critic_config(experiment.trainer),
    )
    return unknown


@torch.no_grad()
def _launch_engine(model: ServedModel) -> list[str]:
    from fp8rl.rollout.engine.plugin.launches import launch_forwards
    from fp8rl.weight_sync.launches import launch_digests

    launch_digests()
    return launch_forwards(read_model(model.path, served=True), model.numerics, model.rollout, model.adapter)


if __name__ == "__main__":
    is_run, values, given = json.load(sys.stdin)
    answer, sys.stdout = sys.stdout, sys.stderr
    asked = values and (parse_experiment(values) if is_run else ServedModel.of(values))
    print(json.dumps(record(asked, (given[0], given[1]))), file=answer)
