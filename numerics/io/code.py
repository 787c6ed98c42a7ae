"""Do two processes run the same code of this project?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path


def code_digest(packages: Iterable[str]) -> str:
    """16 hex digits of the SHA-256 over the Python files of these packages, as this process would import them."""
    total = hashlib.sha256()
    for package in sorted(packages):
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"found no package {package}, expected it beside the others. Install fp8rl again")
        root = Path(spec.submodule_search_locations[0])
        for file in sorted(root.rglob("*.py")):
            total.update(f"{package}/{file.relative_to(root).as_posix()}\0".encode())
            total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]
