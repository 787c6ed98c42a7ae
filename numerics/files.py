"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a text file under a temporary name, flush it to disk, and rename it into place."""
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def publish_directory(partial: Path, path: Path) -> None:
    """Flush a finished directory and rename it to `path`, in place of what stood there."""
    for file in partial.rglob("*"):
        if file.is_file():
            _fsync(file)
    _fsync(partial)
    retired = path.with_name(f".{path.name}.retired")
    shutil.rmtree(retired, ignore_errors=True)
    if path.exists():
        os.replace(path, retired)
    os.replace(partial, path)
    _fsync(path.parent)
    shutil.rmtree(retired, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
