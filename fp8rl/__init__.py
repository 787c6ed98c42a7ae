"""The public interface: the names that users' rewards, environments, algorithms and notebooks import.

A name is imported when it is first asked for (PEP 562), so that `import fp8rl` itself costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8rl.numerics.core.errors import UserError
    from fp8rl.rl.algorithms.base import AlgorithmConfig, Needs, Outcomes, used_tokens
    from fp8rl.rl.algorithms.parts.loss import Surrogate
    from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
    from fp8rl.rl.experiment import Experiment, load_experiment
    from fp8rl.rl.record.rollouts import RolloutRecord
    from fp8rl.rollout.tasks.environments.conversation import Conversation, Turn
    from fp8rl.rollout.types import Problem
    from fp8rl.run import Run
    from fp8rl.trainer.step.batch import Objective, ObjectiveOutput, TokenBatch
    from fp8rl.training import RunFailedError, train

_HOMES = {
    "fp8rl.run": ("Run",),
    "fp8rl.training": ("RunFailedError", "train"),
    "fp8rl.numerics.core.errors": ("UserError",),
    "fp8rl.rl.algorithms.base": ("AlgorithmConfig", "Needs", "Outcomes", "used_tokens"),
    "fp8rl.rl.algorithms.parts.loss": ("Surrogate",),
    "fp8rl.rl.algorithms.policy_gradient": ("PolicyGradient",),
    "fp8rl.rl.experiment": ("Experiment", "load_experiment"),
    "fp8rl.rl.record.rollouts": ("RolloutRecord",),
    "fp8rl.rollout.types": ("Problem",),
    "fp8rl.rollout.tasks.environments.conversation": ("Conversation", "Turn"),
    "fp8rl.trainer.step.batch": ("Objective", "ObjectiveOutput", "TokenBatch"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AlgorithmConfig",
    "Conversation",
    "Experiment",
    "Needs",
    "Objective",
    "ObjectiveOutput",
    "Outcomes",
    "PolicyGradient",
    "Problem",
    "RolloutRecord",
    "Run",
    "RunFailedError",
    "Surrogate",
    "TokenBatch",
    "Turn",
    "UserError",
    "load_experiment",
    "train",
    "used_tokens",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("fp8rl")
    if name not in _HOME:
        raise AttributeError(f"module 'fp8rl' has no attribute {name!r}; it has {', '.join(__all__)}")
    found = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
