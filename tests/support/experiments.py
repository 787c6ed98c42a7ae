"""Experiments without a model and data, for what looks at settings alone."""

from typing import Any

from pydantic import TypeAdapter

from fp8rl.rl.algorithms import Algorithm
from fp8rl.rl.experiment import Experiment, parse_experiment
from fp8rl.rollout.config import RolloutSection

VALUES = {"model": {"path": "/m"}, "data": {"train": "/t"}}


def experiment(**sections: Any) -> Experiment:
    """The defaults with these sections changed."""
    return parse_experiment({**VALUES, **sections})


def algorithm(name: str, longest: int = 20, **settings: Any) -> Any:
    """An algorithm as a run has it whose answers have at most `longest` tokens."""
    found: Any = TypeAdapter(Algorithm).validate_python({"name": name, **settings})
    return found.resolved(RolloutSection(max_new_tokens=longest))
