"""The files of code: a digest by which two processes compare theirs, and the module of a file that a user names."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from fp8rl.numerics.core.reading import read_bytes

_SOURCE = "__fp8rl_source__"
"""The attribute of a module that has the path and the contents of its file."""


def module_of_file(path: str, key: str) -> ModuleType:
    """Import a file as a module, unless that is done already and the file has not changed since. Raises UserError,
    which names `key`, if the file cannot be read; and whatever the module raises."""
    source = os.path.abspath(path), read_bytes(Path(path), key, "a file of Python", "Correct the path.")
    name = "fp8rl_user_" + Path(path).stem
    if getattr(sys.modules.get(name), _SOURCE, None) == source:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    setattr(module, _SOURCE, source)
    return module


def code_digest(packages: Iterable[str], beside: str | None = None) -> str:
    """Hash the Python files of these packages, as this process would import them, and the file `beside`.

    Return 16 hex digits of the SHA-256.
    """
    total = hashlib.sha256(Path(beside).read_bytes() if beside is not None else b"")
    for package in sorted(packages):
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"found no package {package}, expected it beside the others. Install fp8rl again")
        root = Path(spec.submodule_search_locations[0])
        for file in sorted(root.rglob("*.py")):
            total.update(f"{package}/{file.relative_to(root).as_posix()}\0".encode())
            total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]
