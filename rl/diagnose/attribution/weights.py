"""Weights in the engine that are not the trainer's, by digest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numerics.spec import QuantSpec
from weight_sync.manifest import Manifest
from weight_sync.quantized import manifest_of

if TYPE_CHECKING:
    from trainer.trainer import Trainer  # megatron is for the ranks, not for the driver


def expected_manifest(trainer: Trainer, spec: QuantSpec) -> Manifest | None:
    """What an engine that serves `spec` must hold at the trainer's version; on rank 0, and every rank must call it."""
    manifest = manifest_of(trainer.export_weights(), spec, trainer.definition, str(trainer.weight_version))
    return manifest if trainer.layout.rank == 0 else None


def uncommitted(expected: Manifest, found: dict[str, str]) -> bool:
    """Whether the engine's last update was never committed: nothing stands for its quantized weights then."""
    return any("@" in digest and "@" not in found.get(name, "@") for name, digest in expected.entries.items())
