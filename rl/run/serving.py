"""What the engines of a run are started with, and what each must say before it is used."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numerics.code import code_digest
from numerics.config import NumericsConfig
from numerics.implementation import implementation_for
from rl.experiment import Experiment
from rl.run.nodes import own_capability
from rl.run.seats import Seats
from rollout.engine import EngineActor
from rollout.plugin.hooks import hooks_for
from rollout.protocol import ENGINE_PACKAGES, LIBRARIES, Report


@dataclass(frozen=True)
class Serving:
    """What engines are started with. make: an actor for the engine of this index, where it has room; it may block.
    checkpoint: an HF directory in the served format. version: of its weights."""

    make: Callable[[int], Any]
    checkpoint: Path
    version: int


def engine_maker(experiment: Experiment, seats: Seats, folder: Path, numerics: NumericsConfig) -> Callable[[int], Any]:
    """Makes the actor of an engine, by its index, on `numerics`; folder: for its log."""

    def make(index: int) -> Any:
        seat = seats.engine(index)
        return EngineActor.options(**seat.actor()).remote(
            experiment.rollout,
            folder / f"engine_{index}.log",
            {"numerics": numerics.to_dict()},
            report_on(numerics, seats.capability(index)),
            seat.host,
        )

    return make


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
        provides=tuple(sorted({hook.provides for hook in hooks if hook.provides})),
        versions={name: importlib.metadata.version(name) for name in LIBRARIES},
        code=code_digest(ENGINE_PACKAGES),
        weight_version="0",
        row_variant_ops=() if numerics.mode == "exact" else None,
        implementation=implementation_for(capability, numerics.spec),
        threads=1,
    )
