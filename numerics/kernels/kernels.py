"""The kernels by the name of the op that they implement (`numerics.backend.dispatch`).

No table lists them: in any file below this package, a function with the name of an op is its kernel.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from fp8rl.numerics import kernels
from fp8rl.numerics.backend.dispatch import OPS


def _kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    for file in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if file.name != __name__:
            for name, value in vars(import_module(file.name)).items():
                if name in OPS and getattr(value, "__module__", None) == file.name:  # defined there, not imported
                    yield name, value


KERNELS: dict[str, Callable[..., Any]] = dict(_kernels())
