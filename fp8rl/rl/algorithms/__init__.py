"""Finds algorithms by name. An algorithm is a class with its settings, advantages, corrections and loss.

A module of this package that has a subclass of `AlgorithmConfig` with a `name` adds an algorithm. A spec may also name
a user's class.
"""

from __future__ import annotations

import difflib
import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import ConfigDict, PlainValidator, SerializeAsAny, ValidationInfo

from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.algorithms.base import KEY, AlgorithmConfig, users_algorithm


def _algorithms() -> dict[str, type[AlgorithmConfig]]:
    found = {}
    for module in pkgutil.iter_modules(__path__):
        for value in vars(import_module(f"{__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, AlgorithmConfig) and value is not AlgorithmConfig:
                for name in get_args(value.model_fields["name"].annotation):  # none: a base class of several
                    found[name] = value
    return dict(sorted(found.items()))


ALGORITHMS = _algorithms()


def algorithm_class(name: object) -> type[AlgorithmConfig]:
    """The class of an algorithm, ours or a user's. Raises UserError: no algorithm has this name."""
    if isinstance(name, str) and ":" in name:
        return users_algorithm(name)
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    meant = "".join(f"Did you mean {close}? " for close in difflib.get_close_matches(str(name), ALGORITHMS, n=1))
    expected = f"{' or '.join(map(repr, sorted(ALGORITHMS)))}, or path/to/file.py:Class"
    raise user_error(KEY, name, expected, f"{meant}Set it in the spec file, or give {KEY}=VALUE on the command line.")


class UnreadAlgorithm(AlgorithmConfig):
    """The settings of a user's algorithm, as read from a run's folder without an import of the user's code."""

    model_config = ConfigDict(extra="allow")
    name: str


READING = {"imports": False}
"""The context for a validation that imports none of the code that a spec names."""


def _of_its_class(values: Any, info: ValidationInfo) -> AlgorithmConfig:
    if isinstance(values, AlgorithmConfig):
        return values
    if info.context == READING and isinstance(values, dict) and ":" in str(values.get("name")):
        return UnreadAlgorithm.model_validate(values)
    kind = algorithm_class(values.get("name")) if isinstance(values, dict) else AlgorithmConfig
    return kind.model_validate(values)


if TYPE_CHECKING:
    Algorithm = AlgorithmConfig
else:
    Algorithm = Annotated[SerializeAsAny[AlgorithmConfig], PlainValidator(_of_its_class)]
    """The type of an experiment's `algorithm` section: any algorithm."""
