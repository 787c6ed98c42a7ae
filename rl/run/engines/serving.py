"""What the engines of a run are started with, and what each must say before it is used."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numerics.backend.implementation import implementation_for
from numerics.config import NumericsConfig
from numerics.io.code import code_digest
from rl.experiment import Experiment
from rl.experiment.teacher import TeacherSection
from rl.run.cluster.nodes import own_capability
from rl.run.cluster.seats import Seats
from rollout.config import RolloutConfig
from rollout.engine import EngineActor
from rollout.plugin.hooks import hooks_for, provided
from rollout.protocol import ENGINE_PACKAGES, LIBRARIES, Report
from weight_sync.manifest import Manifest


@dataclass(frozen=True)
class Serving:
    """What engines are started with. make: an actor for the engine of this index, where it has room; it may block.
    checkpoint: an HF directory in the served format. version: of its weights. manifest: what it holds, for engines that
    work as soon as they hold the same; None: they wait for a sync."""

    make: Callable[[int], Any]
    checkpoint: Path
    version: int
    manifest: Manifest | None = None


def engine_maker(experiment: Experiment, seats: Seats, folder: Path, numerics: NumericsConfig) -> Callable[[int], Any]:
    """Makes the actor of an engine of the policy, by its index, on `numerics`; folder: for its log."""
    return lambda index: _actor(experiment.rollout, seats, index, folder / f"engine_{index}.log", numerics)


def teacher_maker(
    experiment: Experiment, teacher: TeacherSection, seats: Seats, folder: Path, numerics: NumericsConfig
) -> Callable[[int], Any]:
    """The same of the teacher, whose engines are seated behind those of the policy."""
    config, before = teacher.engine(experiment.rollout), len(experiment.engine_ranks) - teacher.engines
    return lambda index: _actor(config, seats, before + index, folder / f"teacher_{index}.log", numerics)


def _actor(config: RolloutConfig, seats: Seats, number: int, log: Path, numerics: NumericsConfig) -> Any:
    seat = seats.engine(number)
    return EngineActor.options(**seat.actor()).remote(
        config, log, {"numerics": numerics.to_dict()}, report_on(numerics, seats.capability(number)), seat.host
    )


def expected_report(numerics: NumericsConfig) -> Report:
    """What an engine's plugin must say before the engine is used, on this machine."""
    return report_on(numerics, own_capability())


def report_on(numerics: NumericsConfig, capability: tuple[int, int] | None) -> Report:
    """The same on a GPU of this compute capability; None: on a CPU."""
    hooks = hooks_for(numerics, cuda=capability is not None)
    return Report(
        spec_digest=numerics.spec.digest(),
        numerics=numerics.to_dict(),
        hooks=tuple(sorted(hook.target for hook in hooks)),
        provides=provided(hooks),
        versions={name: importlib.metadata.version(name) for name in LIBRARIES},
        code=code_digest(ENGINE_PACKAGES),
        weight_version="0",
        row_variant_ops=() if numerics.mode == "exact" else None,
        implementation=implementation_for(capability, numerics.spec),
        threads=1,
    )
