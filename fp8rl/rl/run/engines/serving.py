"""Settings that a run's engines, and its teacher's, are started with, and the report that each must give first."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8rl.models import read_model
from fp8rl.models.adapters import AdapterSection
from fp8rl.models.architecture import Role
from fp8rl.numerics.backend.implementation import implementation_for
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.files import code_digest
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.run.cluster.nodes import own_capability
from fp8rl.rl.run.cluster.reservations import Reservations
from fp8rl.rollout.engine.engine import EngineActor
from fp8rl.rollout.engine.plugin.hooks import hooks_for
from fp8rl.rollout.engine.protocol import ENGINE_PACKAGES, LIBRARIES, EngineReport
from fp8rl.rollout.types import NO_WEIGHTS
from fp8rl.weight_sync.manifest import Manifest, Recorder
from fp8rl.weight_sync.served import convert_checkpoint, write_served_checkpoint


@dataclass(frozen=True)
class Serving:
    """Settings that engines are started with."""

    make: Callable[[int], Any]
    """Starts the actor of the engine with this index, on a node with room; it may block."""
    checkpoint: Path
    """An HF directory in the served format."""
    version: int = 0
    """Version of the checkpoint's weights, or `NO_WEIGHTS`."""
    manifest: Manifest | None = None
    """Digests of the checkpoint's tensors: an engine gets groups once its own are equal. None: it waits for a sync."""
    role: Role = "policy"
    """The role of the engines' model."""


def prepare_serving(
    experiment: Experiment, role: Role, numerics: NumericsConfig, reservations: Reservations, folder: Path
) -> Serving:
    """Write what engines of this role start from, and return the settings to start them.

    The policy's start without weights, which a sync brings. The teacher's start from a quantized copy of `teacher.path`
    and are never synced: they score once their digests equal the copy's. folder: has this, and the engines' logs.
    """
    checkpoint, name = folder / "served" / role, "engine" if role == "policy" else role
    config, base, version, manifest = experiment.rollout, experiment.base_spec, NO_WEIGHTS, None
    adapter, architecture = engine_adapter(experiment, role), experiment.model.architecture
    if role == "policy":
        if experiment.needs_engines:
            write_served_checkpoint((), experiment.model.directory, checkpoint, numerics.rollout_spec)
    else:
        assert experiment.teacher is not None
        config, base, version = experiment.teacher.engine(config), None, 0
        recorder = Recorder(read_model(experiment.teacher.directory).tensors, config.tp)
        convert_checkpoint(experiment.teacher.directory, checkpoint, numerics.rollout_spec, recorder)
        manifest = Manifest.merged(version, numerics.rollout_spec, [recorder.sent()], role)
    plugin = {
        "numerics": numerics.to_dict(),
        "role": role,
        "adapter": adapter and adapter.model_dump(mode="json"),
        "shared_base": base is not None and base == numerics.rollout_spec,
        "architecture": architecture,
    }

    def make(index: int) -> Any:
        placement, capability = reservations.engine(role, index)
        expected = expected_report(numerics, adapter, architecture, role, lambda: capability)
        log = folder / f"{name}_{index}.log"
        return EngineActor.options(**placement.actor_options()).remote(config, log, plugin, expected, placement.host)

    return Serving(make, checkpoint, version, manifest, role)


def engine_adapter(experiment: Experiment, role: Role = "policy") -> AdapterSection | None:
    """Return the adapters that an engine holds separately from its weights; None if there are none, or merged ones."""
    adapter = experiment.adapter
    return adapter if adapter is not None and role == "policy" and adapter.mode == "separate" else None


def expected_report(
    numerics: NumericsConfig,
    adapter: AdapterSection | None = None,
    architecture: str | None = None,
    role: Role = "policy",
    gpu: Callable[[], tuple[int, int] | None] = own_capability,
) -> EngineReport:
    """Return the report that an engine's plugin must give before the engine is used.

    gpu: returns the compute capability of the engine's GPU, or None for a CPU. By default this machine's.
    """
    capability = gpu()
    hooks = hooks_for(numerics, cuda=capability is not None)
    return EngineReport(
        role=role,
        spec_digest=numerics.spec.digest(),
        numerics=numerics.to_dict(),
        hooks=tuple(sorted(hook.target for hook in hooks)),
        versions={name: importlib.metadata.version(name) for name in LIBRARIES},
        code=code_digest(ENGINE_PACKAGES, architecture),
        weight_version="0",
        row_variant_ops=() if numerics.mode == "exact" else None,
        implementation=implementation_for(capability, numerics.spec),
        threads=1,
        kv_cache_dtype=numerics.kv_format.dtype_name,
        adapter=adapter.model_dump(mode="json") if adapter else None,
    )
