"""An algorithm of a user's: a step of it is taken over made-up answers before a run starts."""

from __future__ import annotations

import inspect
from types import FunctionType

from numerics.errors import user_error
from numerics.time_limit import time_limit
from rl.algorithms import ALGORITHMS
from rl.algorithms.base import AlgorithmConfig
from rl.algorithms.rehearsal import rehearse
from rl.experiment import Experiment

STEP_SECONDS = 20.0
"""Seconds of patience for what takes a hundredth of one."""


def check_algorithm(experiment: Experiment) -> None:
    """Whether the algorithm comes through a step; ours do, as tests hold.

    Raises:
        UserError: a user's does not.
    """
    algorithm = experiment.algorithm
    if type(algorithm) in ALGORITHMS.values():
        return
    _check_signatures(type(algorithm), algorithm.name)
    try:
        with time_limit(STEP_SECONDS):
            rehearse(algorithm, min(experiment.rollout.group_size, 3))
    except Exception as error:  # whatever a user's code may raise
        raise user_error(
            "algorithm.name",
            found=algorithm.name,
            expected=f"an algorithm that a step can be taken with; this one ends in {type(error).__name__}: {error}",
            remedy="Correct it; docs/extending.md says what an algorithm is.",
        ) from error


def _check_signatures(kind: type[AlgorithmConfig], name: str) -> None:
    """Compare what the class says anew with the class of ours that has it. Raises UserError: it is called otherwise."""
    for method, own in vars(kind).items():
        base = next((vars(above)[method] for above in kind.__mro__[1:] if method in vars(above)), None)
        if method.startswith("_") or not isinstance(base, FunctionType | property):
            continue
        if isinstance(base, property):
            fits, expected = not isinstance(own, FunctionType), f"@property def {method}(self)"
        else:
            signature = inspect.signature(base)
            fits, expected = _takes(own, len(signature.parameters)), f"def {method}{signature}".replace("'", "")
        if not fits:
            found = f"def {method}{inspect.signature(own)}" if callable(own) else f"{method}, a {type(own).__name__}"
            raise user_error(
                "algorithm.name",
                found=f"{name} with {found}".replace("'", ""),
                expected=expected,
                remedy="Write it with these parameters; docs/api.md has all signatures.",
            )


def _takes(function: object, arguments: int) -> bool:
    if not isinstance(function, FunctionType):
        return False
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError:
        return False
    return True
