"""Weights in the engine that are not the trainer's, by digest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numerics.spec import QuantSpec
from trainer.actor import TrainerGroup
from weight_sync.manifest import Manifest, Sent
from weight_sync.quantized import would_send

if TYPE_CHECKING:
    from trainer.trainer import Trainer  # megatron is for the ranks, not for the driver


def expected_manifest(trainer: TrainerGroup, spec: QuantSpec) -> Manifest:
    """What an engine that serves `spec` must hold at the trainer's version."""
    return Manifest.merged(trainer.weight_version, spec, trainer.apply(_would_send, spec))


def _would_send(trainer: Trainer, spec: QuantSpec) -> Sent:
    return would_send(trainer.export_weights(), spec, trainer.definition)


def uncommitted(expected: Manifest, found: dict[str, str]) -> bool:
    """Whether the engine's last update was never committed: nothing stands for its quantized weights then."""
    return any("@" in digest and "@" not in found.get(name, "@") for name, digest in expected.entries.items())
