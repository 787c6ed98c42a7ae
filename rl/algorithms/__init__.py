"""What a batch is learnt by: advantages, corrections and losses. Each algorithm is one file, its settings beside it.

An algorithm joins by being here: a module with a subclass of `AlgorithmConfig` that has a `name`.
"""

from __future__ import annotations

import functools
import operator
import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, get_args

from pydantic import Field

from rl.algorithms.base import AlgorithmConfig


def _algorithms() -> dict[str, type[AlgorithmConfig]]:
    """The algorithms of this package by name."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        for value in vars(import_module(f"{__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, AlgorithmConfig) and value is not AlgorithmConfig:
                for name in get_args(value.model_fields["name"].annotation):  # none: a base class of several
                    found[name] = value
    return found


ALGORITHMS = _algorithms()

if TYPE_CHECKING:
    Algorithm = AlgorithmConfig
else:
    Algorithm = Annotated[functools.reduce(operator.or_, ALGORITHMS.values()), Field(discriminator="name")]
    """Any of them: the type of an experiment's `algorithm` section."""
