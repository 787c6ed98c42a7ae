"""An algorithm of a user's: a step of it is taken over made-up answers before a run starts."""

from __future__ import annotations

from fp8rl.numerics.errors import user_error
from fp8rl.numerics.time_limit import time_limit
from fp8rl.rl.algorithms import ALGORITHMS
from fp8rl.rl.algorithms.rehearsal import rehearse
from fp8rl.rl.experiment import Experiment

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
