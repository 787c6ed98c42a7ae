"""What the plugin holds in the engine's scheduler process: the numerics, the weights, and the report on both."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

import torch

from numerics.config import NumericsConfig
from numerics.implementation import Implementation
from numerics.probe import row_variant_ops
from rollout.plugin.weights import ServedWeights


@dataclasses.dataclass
class EngineState:
    """The plugin's state in one process, made when SGLang loads the plugin."""

    numerics: NumericsConfig
    weights: ServedWeights
    hooks: tuple[str, ...] = ()
    implementation: Implementation = "torch"
    row_variant: tuple[str, ...] | None = None


_state: EngineState | None = None


def configure(numerics: NumericsConfig) -> None:
    """Called once per process, before any hook is installed."""
    global _state
    _state = EngineState(numerics=numerics, weights=ServedWeights(numerics.rollout_spec.weight))


def state() -> EngineState:
    """This process's state. Raises `RuntimeError` where the plugin was not configured."""
    if _state is None:
        raise RuntimeError("fp8rl plugin: not configured in this process; FP8RL_PLUGIN was not set when it started")
    return _state


def report() -> dict[str, Any]:
    """What this engine runs, as plain data: the answer to the handshake."""
    current = state()
    exact = current.numerics.mode == "exact"
    if exact and current.row_variant is None:
        current.row_variant = tuple(row_variant_ops(current.weights.device))
    return {
        "spec_digest": current.numerics.spec.digest(),
        "numerics": current.numerics.to_dict(),
        "hooks": sorted(current.hooks),
        "implementation": current.implementation,
        "versions": {name: importlib.metadata.version(name) for name in ("sglang", "torch", "fp8rl")},
        "weight_version": current.weights.version,
        "row_invariant": not current.row_variant if exact else None,
        "row_variant_ops": list(current.row_variant or ()),
        "threads": torch.get_num_threads(),
    }
