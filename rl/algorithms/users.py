"""Algorithms of users: a class that a spec names, found, imported and looked at."""

from __future__ import annotations

import inspect
import sys
from types import FunctionType

from fp8rl.numerics.errors import user_error
from fp8rl.rl.algorithms.base import AlgorithmConfig
from fp8rl.rollout.named_functions import named_object

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
    check_methods(found, name)
    cloudpickle.register_pickle_by_value(sys.modules[found.__module__])
    return found


def check_methods(kind: type[AlgorithmConfig], name: str) -> None:
    """Compare the methods of a user's class with those that it overrides, by whose parameters they are called.

    Raises:
        UserError: one takes other parameters, or a method stands where a property is read.
    """
    ours = [each for each in kind.__mro__ if each.__module__.startswith("fp8rl.rl.algorithms")]
    for own in (each for each in kind.__mro__ if issubclass(each, AlgorithmConfig) and each not in ours):
        for method, said in vars(own).items():
            base = next((vars(above)[method] for above in ours if method in vars(above)), None)
            if method.startswith("_") or not isinstance(said, FunctionType):
                continue
            if isinstance(base, property):
                expected = f"@property def {method}(self)"
            elif isinstance(base, FunctionType) and not _takes(said, len(inspect.signature(base).parameters)):
                expected = f"def {method}{inspect.signature(base)}"
            else:
                continue
            raise user_error(
                KEY,
                found=f"{name} with def {method}{inspect.signature(said)}".replace("'", ""),
                expected=expected.replace("'", ""),
                remedy="Write it so; docs/api.md has all signatures.",
            )


def _takes(function: FunctionType, arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError:
        return False
    return True
