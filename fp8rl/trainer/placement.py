"""Where one process of a run is placed: a trainer rank or an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fp8rl.numerics.core.process import LOOPBACK


@dataclass(frozen=True)
class ActorPlacement:
    """Where an actor runs. By default this machine, without a GPU, among processes that all are on loopback."""

    host: str = LOOPBACK
    """Address at which the run's other processes reach this one."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the process's environment."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Ray's options of the actor."""

    def actor_options(self, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return Ray's options of the actor, with more variables of its environment."""
        return {**self.options, "runtime_env": {"env_vars": {**(environment or {}), **self.environment}}}
