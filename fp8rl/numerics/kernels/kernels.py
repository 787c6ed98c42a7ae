"""Finds the kernel of each op by the op's name (`numerics.backend.dispatch`).

No table lists them: in any file below this package, a function with the name of an op is its kernel.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITFunction

from fp8rl.numerics import kernels
from fp8rl.numerics.backend.dispatch import OPS


def _modules() -> Iterator[ModuleType]:
    for file in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if file.name != __name__:
            yield import_module(file.name)


def functions() -> Iterator[JITFunction[Any]]:
    """Return all functions of ours that Triton compiles. Its interpreter has none."""
    for module in _modules():
        yield from (value for value in vars(module).values() if isinstance(value, JITFunction))


def _kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    for module in _modules():
        for name, value in vars(module).items():
            if name in OPS and getattr(value, "__module__", None) == module.__name__:  # defined there, not imported
                yield name, value


KERNELS: dict[str, Callable[..., Any]] = dict(_kernels())

# All functions are hashed in one order, so that every process gives a kernel the same key in Triton's cache. By itself
# Triton hashes a kernel when it is first launched. The hash includes the globals of a function that the kernel calls
# only if the function was hashed before: `DependenciesFinder._update_hash` asks for the globals first, and hashes the
# function afterwards. So a kernel's key would depend on what the process launched before it.
for function in functions():
    _ = function.cache_key
