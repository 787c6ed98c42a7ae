"""Stand-ins for packages that SGLang imports on CUDA, where they are not installed.

It needs nothing but Python: `fifteen.pack` packs it as the `sitecustomize` of a machine.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any


def put(packages: Collection[str], when_called: Callable[[str], object]) -> None:
    """Have imports of these packages find stand-ins in this process. when_called: told the name of one that is
    called; what it raises ends the call."""

    class StandIn:
        """Something of such a package: it has every attribute, and may be called."""

        __name__: str

        def __init__(self, name: str) -> None:
            self.__dict__.update(__name__=name, __qualname__=name)

        def __getattr__(self, name: str) -> StandIn:
            if name.startswith("__"):
                raise AttributeError(name)
            return StandIn(f"{self.__name__}.{name}")

        def __call__(self, *args: Any, **kwargs: Any) -> StandIn:
            when_called(self.__name__)
            return StandIn(f"{self.__name__}()")

        def __or__(self, other: Any) -> StandIn:  # in annotations
            return self

        __ror__ = __or__

    class Package(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name[0].isupper() and not name.isupper():  # a class, which may be inherited from
                made: dict[str, Any] = {"__init__": lambda self, *args, **kwargs: StandIn.__init__(self, name)}
                # A field of a pydantic model may be one.
                made["__get_pydantic_core_schema__"] = classmethod(lambda *_: {"type": "any"})
                return type(name, (StandIn,), made)
            return StandIn(f"{self.__name__}.{name}")

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
            wanted = name.split(".")[0] in packages
            return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

        def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
            package = Package(spec.name)
            package.__path__ = []
            return package

        def exec_module(self, module: types.ModuleType) -> None:
            pass

    sys.meta_path.insert(0, Finder())


def refuse(name: str) -> None:
    """Raise RuntimeError: one was called, where none may be."""
    raise RuntimeError(f"{name} was called, and a stand-in is in its place")
