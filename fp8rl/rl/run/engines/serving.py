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
from fp8rl.weight_sync.manifest import Manifest, Recorder
from fp8rl.weight_sync.served import convert_checkpoint


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


def engine_maker(
    experiment: Experiment, role: Role, reservations: Reservations, folder: Path, numerics: NumericsConfig
) -> Callable[[int], Any]:
    """Return a function that starts the actor of an engine of this role, by index. folder: has the engines' logs."""
    config, adapter, architecture = experiment.rollout, engine_adapter(experiment, role), experiment.model.architecture
    if role == "teacher":
        assert experiment.teacher is not None
        config = experiment.teacher.engine(config)
    base = experiment.base_spec if role == "policy" else None
    plugin = {
        "numerics": numerics.to_dict(),
        "role": role,
        "adapter": adapter and adapter.model_dump(mode="json"),
        "shared_base": base is not None and base == numerics.rollout_spec,
        "architecture": architecture,
    }

    def make(index: int) -> Any:
        placement, capability = reservations.engine(role, index)
        return EngineActor.options(**placement.actor_options()).remote(
            config,
            folder / f"{'engine' if role == 'policy' else role}_{index}.log",
            plugin,
            expected_report(numerics, adapter, architecture, role, lambda: capability),
            placement.host,
        )

    return make


def teacher_serving(experiment: Experiment, reservations: Reservations, folder: Path) -> Serving:
    """Quantize a copy of `teacher.path`, and return the settings to start engines from it. Its weights are never
    synced: an engine scores once its digests equal the copy's. folder: for the copy, and for the engines' logs."""
    assert experiment.teacher is not None
    source, checkpoint, version = experiment.teacher.directory, folder / "served" / "teacher", 0
    numerics = experiment.teacher.numerics(experiment.numerics, experiment.numerics_config().k_splits)
    recorder = Recorder(read_model(source).tensors, experiment.teacher.tp)
    convert_checkpoint(source, checkpoint, numerics.rollout_spec, recorder)
    manifest = Manifest.merged(version, numerics.rollout_spec, [recorder.sent()], "teacher")
    make = engine_maker(experiment, "teacher", reservations, folder, numerics)
    return Serving(make, checkpoint, version, manifest, "teacher")


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
