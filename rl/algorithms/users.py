"""Algorithms of users: a class that a spec names, found, imported and looked at."""

from __future__ import annotations

import sys

from numerics.errors import user_error
from rl.algorithms.base import AlgorithmConfig
from rollout.named_functions import named_object

KEY = "algorithm.name"


def users_algorithm(name: str) -> type[AlgorithmConfig]:
    """The class that `path/to/file.py:Class` or `package.module:Class` stands for.

    Its module travels to the trainer's ranks with each objective, so that they need no file of the user's.

    Raises:
        UserError: there is no such class, its module cannot be imported, or it is no algorithm.
    """
    from ray import cloudpickle  # takes a second, which only such an algorithm costs

    found = named_object(name, KEY, {})
    if not (isinstance(found, type) and issubclass(found, AlgorithmConfig)):
        raise user_error(
            KEY,
            found=name,
            expected="a subclass of fp8rl.PolicyGradient, or of fp8rl.AlgorithmConfig",
            remedy="Correct the name after the colon, or derive the class from one of these.",
        )
    cloudpickle.register_pickle_by_value(sys.modules[found.__module__])
    return found
