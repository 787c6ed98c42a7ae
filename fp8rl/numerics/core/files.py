"""Writes files that appear whole or not at all, imports a user's Python file, and examines the running code."""

from __future__ import annotations

import errno
import hashlib
import inspect
import os
import pkgutil
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from io import FileIO
from pathlib import Path
from types import ModuleType

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.reading import check_path, read_bytes, reason

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(OSError):
    """A disk had no room for a file. The message names the file and the remedy; the command line prints it alone."""


def is_full(error: BaseException) -> bool:
    """Return whether an error says that a disk, or a quota, is full."""
    return isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in _NO_ROOM)


def check_writable(path: Path, key: str) -> None:
    """Check that a file or directory can be written at `path`, before the work for it begins. The check leaves no file.
    Raises UserError, which calls the path `key`, if it cannot."""
    check_path(path, key)
    path = path.absolute()
    above = next((parent for parent in path.parents if os.path.lexists(parent)), path)
    try:
        if not above.is_dir():
            raise OSError("which is no directory")
        tempfile.TemporaryFile(dir=above).close()  # root may write to /proc and /sys, where nothing can be made
    except OSError as error:
        found = f"{above}, {reason(error)}"
        raise user_error(key, found=found, expected=f"room for {path}", remedy="Choose another place.") from error


def check_page(path: Path, key: str) -> None:
    """Refuse a path that cannot be written, or at which there is a file other than a page: `--page spec.yaml` would
    replace the spec. Raises UserError, which calls the path `key`."""
    check_writable(path, key)
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or path.suffix != ".html"):
        kind = "a link" if path.is_symlink() else "a directory" if path.is_dir() else "no page"
        expected = "a new file, or an .html to replace"
        raise user_error(key, found=f"{path}, which is {kind}", expected=expected, remedy="Give another name.")


@contextmanager
def writing(path: Path, key: str) -> Iterator[None]:
    """Turn an OSError of writing `path` inside the block into a message for the user. Raises DiskFullError if the disk
    is full, else UserError, which calls the path `key`."""
    try:
        with room_for(path):
            yield
    except DiskFullError:
        raise
    except OSError as error:
        remedy = "Choose another place."
        found = f"{path}: {reason(error)}"
        raise user_error(key, found=found, expected="a place that can be written to", remedy=remedy) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name, flush it, and rename it. Directories are made; a failure leaves no trace."""
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.partial")
    with room_for(path):
        path.parent.mkdir(parents=True, exist_ok=True)
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
    """Append a line so that it is there whole or not at all, and flush it to disk.

    An incomplete last line, left by a power cut, stays a line of its own.
    """
    with room_for(path), path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
        append_whole(file, path, ("\n" * torn + line + "\n").encode())


def append_whole(file: FileIO, path: Path, data: bytes) -> None:
    """Append by one write to a file that is open unbuffered at `path`. A reader never sees a part of the data.

    If the disk fills up, the part that was written is removed again.
    """
    with room_for(path):
        end = file.seek(0, os.SEEK_END)
        if file.write(data) != len(data):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file.fileno())


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a directory to fill inside the block. Afterwards it replaces `path`; if the block fails, it is removed."""
    partial = path.with_name(f".{path.name}.partial")
    with room_for(path):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
            publish_directory(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Turn errors of a full disk into `DiskFullError`. The system's error names neither the file nor a remedy, and the
    error of safetensors is no OSError."""
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        number = re.search(r"(?:Errno|os error) (\d+)", str(error))
        if number is None or int(number[1]) not in _NO_ROOM:
            raise
        above = next(parent for parent in path.absolute().parents if parent.exists())
        free = shutil.disk_usage(above).free >> 20
        raise DiskFullError(
            f"{path}: found {os.strerror(int(number[1]))!r} with {free} MiB free, expected room to write it. "
            "Free some, or write to another disk"
        ) from error


def publish_directory(partial: Path, path: Path) -> None:
    """Flush a finished directory and rename it to `path`, in place of what was there.

    The safetensors library lets only the owner read its files. Here they become as readable as the directory.
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
    """fsync a file, or a directory. The renames in a directory then survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in 64 hex digits. The file is read in parts, so it may be large."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# Python files.

_SOURCE = "__fp8rl_source__"
"""The attribute of a user's module that has the path and the contents of its file."""


def module_of_file(path: str, key: str) -> ModuleType:
    """Import a file as a module, or return the module imported before if the file has not changed since. Raises
    UserError, which names `key`, if the file cannot be read, and whatever the module itself raises."""
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


def changed_signature(path: str, expected: str | None) -> str | None:
    """Return a line that says how a library's function or class differs from what is expected of it; None: it does not.

    path: its dotted name. expected: the names of its parameters, in order, without `self`. None: any.
    """
    try:
        target = pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        return f"  {path}: not found ({error})"
    if expected is None:
        return None
    found = " ".join(name for name in inspect.signature(target).parameters if name != "self")
    return None if found == expected else f"  {path}: found the parameters {found!r}, expected {expected!r}"


def code_digest(packages: Iterable[str], beside: str | None = None) -> str:
    """Hash the Python files of these packages, as this process would import them, and the further file `beside`.

    Return 16 hex digits of the SHA-256.
    """
    total = hashlib.sha256(Path(beside).read_bytes() if beside is not None else b"")
    for package in sorted(packages):
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"found no package {package}, expected it to be installed. Install fp8rl again")
        root = Path(spec.submodule_search_locations[0])
        for file in sorted(root.rglob("*.py")):
            total.update(f"{package}/{file.relative_to(root).as_posix()}\0".encode())
            total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]
