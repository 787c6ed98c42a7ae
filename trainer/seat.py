"""Where one process of a run is put: a rank of the trainer, or an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Seat:
    """A place on a node. By itself: this machine, without a GPU, among processes that all are on loopback.

    host: address at which the run's other processes reach one that sits here. environment: of that process.
    options: Ray's, of its actor.
    """

    host: str = LOOPBACK
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def actor(self, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Ray's options of the actor that sits here, with more of an environment."""
        return {**self.options, "runtime_env": {"env_vars": {**(environment or {}), **self.environment}}}
