"""Ops with two implementations: a pure-torch definition, which is also the oracle, and a kernel.

An op is a function marked with `op`. Calling it calls its definition or, once kernels are installed in the process
(`numerics.backend.implementation`), its kernel, which goes by the definition's name and has its signature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Kernels = Mapping[str, Callable[..., Any]]

OPS: dict[str, Callable[..., Any]] = {}
"""The definitions by name, once their modules are imported."""
_kernels: Kernels | None = None


def op(definition: Callable[P, R]) -> Callable[P, R]:
    """Mark the definition of an op."""
    name = definition.__name__
    OPS[name] = definition

    @functools.wraps(definition)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _kernels is None:
            return definition(*args, **kwargs)
        if name not in _kernels:
            raise NotImplementedError(
                f"numerics: found no kernel for the op {name}, expected one for every op where kernels run; its torch "
                "definition would be another implementation than the other side's. Write the kernel, or use a CPU"
            )
        return _kernels[name](*args, **kwargs)

    return call


def install(kernels: Kernels | None) -> None:
    """Run all ops of this process on these kernels; None: on their definitions."""
    global _kernels
    _kernels = kernels


def installed() -> Kernels | None:
    """Return the kernels that `install` was last given."""
    return _kernels
