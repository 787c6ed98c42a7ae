"""State of the plugin in the engine's scheduler process: the numerics, the weights, and the report on both."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

import torch

from fp8rl.models.adapters import AdapterSection
from fp8rl.models.architecture import Role
from fp8rl.numerics.backend.dispatch import Implementation
from fp8rl.numerics.backend.probe import row_variant_ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.files import code_digest
from fp8rl.rollout.plugin.weights import ServedWeights
from fp8rl.rollout.protocol import ENGINE_PACKAGES, LIBRARIES, EngineReport


@dataclasses.dataclass
class EngineState:
    """The plugin's state in one process, made when SGLang loads the plugin."""

    numerics: NumericsConfig
    role: Role
    weights: ServedWeights
    adapter: AdapterSection | None = None
    waits: bool = False
    """Whether it has placeholders for weights, until a base arrives."""
    base_name: str | None = None
    """What clients call the base beside the adapters; None: it is not served."""
    architecture: str | None = None
    """The user's file that has the model's; None: it is one of ours."""
    hooks: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    implementation: Implementation = "torch"
    row_variant: tuple[str, ...] | None = None
    without_deepgemm: str | None = None
    released: dict[str, list[tuple[torch.UntypedStorage, int]]] = dataclasses.field(default_factory=dict)
    """What sleeps, by tag, and where it was done here the memory that was freed for it, with its bytes."""


_state: EngineState | None = None


def configure(
    numerics: NumericsConfig,
    role: Role = "policy",
    adapter: AdapterSection | None = None,
    waits: bool = False,
    base_name: str | None = None,
    architecture: str | None = None,
) -> None:
    """Called once per process, before any hook is installed. adapter: that stands beside the weights. waits, base_name,
    architecture: see `EngineState`."""
    global _state
    weights = ServedWeights(numerics.rollout_spec.weight)
    _state = EngineState(numerics, role, weights, adapter, waits, base_name, architecture)


def state() -> EngineState:
    """This process's state. Raises `RuntimeError` where the plugin was not configured."""
    if _state is None:
        raise RuntimeError("fp8rl plugin: not configured in this process; FP8RL_PLUGIN was not set when it started")
    return _state


def report(runner: Any) -> EngineReport:
    """Return what this engine runs: the answer to the handshake. runner: SGLang's ModelRunner."""
    current = state()
    exact = current.numerics.mode == "exact"
    if exact and current.row_variant is None:
        current.row_variant = tuple(row_variant_ops(current.weights.device))
    return EngineReport(
        role=current.role,
        spec_digest=current.numerics.spec.digest(),
        numerics=current.numerics.to_dict(),
        hooks=tuple(sorted(current.hooks)),
        provides=current.provides,
        versions={name: importlib.metadata.version(name) for name in LIBRARIES},
        code=code_digest(ENGINE_PACKAGES, current.architecture),
        weight_version=current.weights.version,
        row_variant_ops=current.row_variant if exact else None,
        implementation=current.implementation,
        without_deepgemm=current.without_deepgemm,
        threads=torch.get_num_threads(),
        dtype=str(runner.dtype).removeprefix("torch."),
        adapter=current.adapter.model_dump(mode="json") if current.adapter else None,
        kv_cache_dtype=str(runner.kv_cache_dtype).removeprefix("torch."),
    )
