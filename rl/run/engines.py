"""The engines of a run, as one: sampling spread over all of them, and the replacement of one that died."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from numerics.code import code_digest
from numerics.config import NumericsConfig
from numerics.implementation import capability_of, implementation_for
from rl.experiment import Experiment
from rollout.arguments import has_cuda
from rollout.engine import EngineActor
from rollout.placement import placement
from rollout.plugin.hooks import hooks_for
from rollout.protocol import ENGINE_PACKAGES, LIBRARIES, Report
from rollout.types import Endpoint, Group, SamplingParams, Trajectory

_STOP_SECONDS = 6.0

_DYING_SECONDS = 2.0
"""A connection breaks a moment before its process is gone."""


class EnginePool:
    """Ray actors that own one server each; any engine answers any prompt."""

    def __init__(self, actors: list[Any], starting: list[Any]) -> None:
        self._actors, self._starting = actors, starting

    @classmethod
    def none(cls) -> EnginePool:
        """No engines: of a run that samples nothing."""
        return cls([], [])

    @classmethod
    def start(
        cls, experiment: Experiment, folder: Path, numerics: NumericsConfig, checkpoint: Path, version: int = 0
    ) -> EnginePool:
        """Begin to start all engines, on `numerics`, from an HF directory in the served format; `wait` for them.

        folder: for their logs.
        """
        gpus = int(ray.cluster_resources().get("GPU", 0))
        own, ranks = experiment.sync.engines_own_gpus, experiment.trainer.world_size
        where = placement(experiment.rollout.engines, gpus, ranks, own)
        actors = [
            EngineActor.options(num_gpus=where.reserved).remote(
                experiment.rollout,
                folder / f"engine_{index}.log",
                {"numerics": numerics.to_dict()},
                expected_report(numerics),
                where.gpus[index],
            )
            for index in range(experiment.rollout.engines)
        ]
        return cls(actors, [actor.start.remote(checkpoint, version) for actor in actors])

    def __len__(self) -> int:
        return len(self._actors)

    def wait(self) -> None:
        """Until every engine answers and has passed the handshake. Raises what went wrong."""
        _get(self._starting)

    def endpoints(self) -> list[Endpoint]:
        return _get([actor.endpoint.remote() for actor in self._actors])

    def sample(self, groups: Sequence[Group], sampling: SamplingParams, expected_version: int) -> list[Trajectory]:
        """The answers of all groups, in their order; `group` is the index of their group.

        Raises StaleWeightsError for a token of another weight version, EngineDiedError if an engine is gone.
        """
        share = -(-len(groups) // len(self._actors))
        parts = [groups[start : start + share] for start in range(0, len(groups), share)]
        calls = [actor.generate.remote(part, sampling, expected_version) for actor, part in zip(self._actors, parts)]
        return [_in_whole(trajectory, index * share) for index, part in enumerate(_get(calls)) for trajectory in part]

    def lost(self) -> int:
        """How many engines have no living server. Looks for a while before it says none."""
        deadline = time.monotonic() + _DYING_SECONDS
        while True:
            lost = sum(not health.alive for health in _get([actor.health.remote() for actor in self._actors]))
            if lost or time.monotonic() > deadline:
                return lost
            time.sleep(0.1)

    def recover(self, checkpoint: Path, version: int) -> int:
        """Replace every engine whose process died by a new one from `checkpoint`; how many."""
        return sum(_get([actor.recover.remote(checkpoint, version) for actor in self._actors]))

    def stop(self) -> None:
        """End all servers and their actors; a second call does nothing."""
        if not self._actors:
            return
        calls = [actor.stop.remote() for actor in self._actors]
        ray.wait(calls, num_returns=len(calls), timeout=_STOP_SECONDS)
        for actor in self._actors:
            ray.kill(actor)  # a server that is still there dies with its actor
        self._actors = []


def expected_report(numerics: NumericsConfig) -> Report:
    """What an engine's plugin must say before the engine is used."""
    hooks = hooks_for(numerics, has_cuda())
    return Report(
        spec_digest=numerics.spec.digest(),
        numerics=numerics.to_dict(),
        hooks=tuple(sorted(hook.target for hook in hooks)),
        provides=tuple(sorted({hook.provides for hook in hooks if hook.provides})),
        versions={name: importlib.metadata.version(name) for name in LIBRARIES},
        code=code_digest(ENGINE_PACKAGES),
        weight_version="0",
        row_variant_ops=() if numerics.mode == "exact" else None,
        implementation=implementation_for(capability_of("cuda" if has_cuda() else "cpu"), numerics.spec),
        threads=1,
    )


def _in_whole(trajectory: Trajectory, first_group: int) -> Trajectory:
    return trajectory if first_group == 0 else replace(trajectory, group=trajectory.group + first_group)


def _get(calls: list[Any]) -> list[Any]:
    """Results in order; an actor's exception comes out as what it was."""
    try:
        return ray.get(calls)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
