"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from numerics.errors import user_error
from numerics.reading import check_path


def check_writable(path: Path, key: str) -> None:
    """Whether a file or directory can be put at `path`, before the work that goes into it. Touches nothing.

    Raises:
        UserError: it cannot; the message speaks of it as `key`.
    """
    check_path(path, key)
    path = path.absolute()
    above = next(parent for parent in path.parents if os.path.lexists(parent))
    if not above.is_dir():
        found = f"{above}, which is no directory"
    elif not os.access(above, os.W_OK | os.X_OK):
        found = f"{above}, which may not be written to"
    else:
        return
    raise user_error(key, found=found, expected=f"room for {path}", remedy="Choose another place.")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file: temporary name, flush to disk, rename. Parent directories are made; a failure leaves no trace."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush_to_disk(path.parent)


def append_line(path: Path, line: str) -> None:
    """Append a line by one unbuffered write, so that it is there whole or not at all, and flush it to disk.

    What a power cut has left of the line before stays a line of its own.
    """
    with path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
        file.write(("\n" * torn + line + "\n").encode())
        os.fsync(file.fileno())


def publish_directory(partial: Path, path: Path) -> None:
    """Flush a finished directory and rename it to `path`, in place of what stood there.

    Its safetensors files, which that library lets nobody but their owner read, become as readable as the directory.
    """
    readable = partial.stat().st_mode & 0o666
    for file in partial.rglob("*"):
        if file.suffix == ".safetensors":
            file.chmod(readable)
        if file.is_file():
            flush_to_disk(file)
    flush_to_disk(partial)
    retired = path.with_name(f".{path.name}.retired")
    shutil.rmtree(retired, ignore_errors=True)
    if path.exists():
        os.replace(path, retired)
    os.replace(partial, path)
    flush_to_disk(path.parent)
    shutil.rmtree(retired, ignore_errors=True)


def flush_to_disk(path: Path) -> None:
    """fsync a file, or a directory, whose renames then survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
