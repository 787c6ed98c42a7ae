"""Weights in the engine that are not the trainer's, by digest."""

from __future__ import annotations

from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.weight_sync.adapters import would_hold
from fp8rl.weight_sync.manifest import Manifest


def expected_manifest(trainer: TrainerGroup, spec: QuantSpec) -> Manifest:
    """What an engine that serves `spec` must hold at the trainer's version."""
    return Manifest.merged(trainer.weight_version, spec, trainer.apply(would_hold, spec))


def uncommitted(expected: Manifest, found: dict[str, str]) -> bool:
    """Whether the engine's last update was never committed: nothing stands for its quantized weights then."""
    return any("@" in digest and "@" not in found.get(name, "@") for name, digest in expected.entries.items())
