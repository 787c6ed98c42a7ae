"""Reads files. If a file is incomplete or of another form, one message says what is wrong with it."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from fp8rl.numerics.core.errors import UserError, shown, user_error

# Text that others wrote, as values: what would break a program further on is refused where it is read.

DEEPEST = 100
"""The deepest nesting of lists and objects. Python's stack holds 1,000 calls; templates use several per level."""
_TOO_DEEP = f"lists and objects nested more than {DEEPEST} deep"


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:20]}")
    return value


def parse_json(data: str | bytes, number: Callable[[str], Any] = _finite) -> Any:
    """Return the value of a JSON text; bytes are UTF-8, with or without a byte order mark.

    number: reads a decimal number, and Python's `NaN` and `Infinity`, which fp8rl itself writes in places. The default
    refuses these two.

    Raises:
        ValueError: the text is no JSON or no UTF-8, has a number beyond the range of a double, or is nested more than
            `DEEPEST` deep.
    """
    text = data if isinstance(data, str) else data.decode("utf-8-sig")
    try:
        value = json.loads(text, parse_float=number, parse_constant=number, parse_int=_whole)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value]
    for _ in range(DEEPEST):
        level = [item for item in level if isinstance(item, dict | list)]
        level = [part for item in level for part in (item.values() if isinstance(item, dict) else item)]
    if any(isinstance(item, dict | list) for item in level):
        raise ValueError(_TOO_DEEP)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is JSON, and no text
    return value


def _whole(text: str) -> int:
    if len(text) > 300:  # which no double reaches, and of thousands of which Python makes no number
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


T = TypeVar("T")
RESTORE = "Restore the file."
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
"""The most bytes that Linux allows in a file's name, and in a whole path."""
LARGEST = 4 << 30
"""The most bytes of a file that is read whole. A larger file would leave no memory for the values made of it."""
MOST_FILES = 100_000
"""The most files of a directory that is looked through."""
_PIECE = 64 << 20
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def check_path(path: str | Path, key: str) -> None:
    """Refuse a text that cannot be a path: it has a NUL, is not UTF-8 or is too long. Raises UserError, which calls
    the text `key`."""
    text = str(path)
    encoded = text.encode("utf-8", "surrogateescape")
    if "\0" in text:
        found, expected = text, "a path without NUL"
    elif encoded != text.encode("utf-8", "replace"):
        found, expected = text, "a path in UTF-8"
    elif len(encoded) > _LONGEST_PATH or any(len(part) > _LONGEST_NAME for part in encoded.split(b"/")):
        found = text
        expected = f"at most {_LONGEST_PATH} bytes, and {_LONGEST_NAME} in each part between slashes"
    else:
        return
    raise user_error(key, found=found, expected=expected, remedy="Correct the path.")


def at_home(text: str) -> str:
    """Replace a leading `~` or `~user` by that home directory, as a shell does."""
    try:
        return os.path.expanduser(text)
    except ValueError:  # it is no path, as `check_path` says
        return text


def open_regular(path: Path) -> FileIO:
    """Open a regular file to read. A pipe or a device is refused, because reading it might never end.

    Raises:
        OSError: the file is missing, not regular, or may not be read.
        ValueError: the path has a NUL.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # else a pipe waits here for a writer
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind in (stat.S_IFREG, stat.S_IFDIR):
        return FileIO(descriptor)  # which refuses a directory by itself
    os.close(descriptor)
    raise OSError(f"{_KINDS.get(kind, 'something')}, no regular file")


def check_file(path: Path, key: str, expected: str) -> None:
    """Refuse a path that is no readable regular file, before a library opens it and waits. Raises UserError, which
    calls the path `key`."""
    check_path(path, key)
    try:
        if path.is_dir():
            raise OSError("a directory")
        open_regular(path).close()
    except OSError as error:
        raise user_error(key, f"{path}: {reason(error)}", expected, "Correct the path.") from error


def check_regular(directory: Path, key: str) -> None:
    """Refuse a directory that has a pipe, a device or a socket, at which a library would wait, or that has more than
    `MOST_FILES` files. Raises UserError, which calls the directory `key`."""
    count = 0
    for folder, _, names in os.walk(directory):
        count += len(names)
        if count > MOST_FILES:
            found = f"{directory} with more than {MOST_FILES} files"
            raise user_error(key, found=found, expected="a directory with fewer files", remedy="Correct the path.")
        for name in sorted(names):
            file = Path(folder, name)
            try:
                kind = _KINDS.get(stat.S_IFMT(file.stat().st_mode))
            except OSError:  # a link to nothing, or to what may not be looked at
                continue
            if kind is not None:
                raise user_error(key, found=f"{file}: {kind}", expected="regular files", remedy="Remove it.")


def read_bytes(path: Path, key: str, expected: str, remedy: str = RESTORE, largest: int = LARGEST) -> bytes:
    """Return the contents of a file; messages call it `key`. Raises UserError if the file is missing, not regular,
    larger than `largest` bytes, or may not be read."""
    check_path(path, key)
    try:
        with open_regular(path) as file:
            pieces, room = [], largest + 1
            while room and (piece := file.read(min(room, _PIECE))):
                pieces.append(piece)
                room -= len(piece)
    except OSError as error:
        raise user_error(key, found=f"{path}: {reason(error)}", expected=expected, remedy=remedy) from error
    if not room:
        found = f"{path}: more than {largest} bytes"
        raise user_error(key, found=found, expected=f"{expected} of at most that many bytes", remedy=remedy)
    return b"".join(pieces)


def read_text(path: Path, key: str, expected: str, remedy: str = RESTORE, largest: int = LARGEST) -> str:
    """Return the text of a UTF-8 file. Raises `UserError` as `read_bytes` does, and if the bytes are not UTF-8."""
    data = read_bytes(path, key, expected, remedy, largest)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {data[error.start]:#04x} at {error.start}, which is no UTF-8"
        raise user_error(f"{key}: {path}", found=found, expected="UTF-8 text", remedy=remedy) from error


def read_json(path: Path, key: str, expected: str, remedy: str = RESTORE) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `UserError` as `read_text` does, and if the text is no JSON object."""
    text = read_text(path, key, expected, remedy)
    try:
        value = parse_json(text, float)
    except ValueError as error:
        raise user_error(f"{key}: {path}", found=str(error), expected="valid JSON", remedy=remedy) from error
    if not isinstance(value, dict):
        raise user_error(f"{key}: {path}", found=value, expected="a JSON object", remedy=remedy)
    return value


def parsed(path: Path, key: str, parse: Callable[[dict[str, Any]], T], remedy: str = RESTORE) -> T:
    """Return `parse` of the object in a JSON file. Raises `UserError` for keys or values that `parse` refuses."""
    values = read_json(path, key, "a JSON object", remedy)
    try:
        return parse(values)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        found = f"{type(error).__name__}: {error}"
        raise user_error(f"{key}: {path}", found, "the keys and values that fp8rl writes", remedy) from error


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be used."""

    number: int
    """The line's number, from 1."""
    found: str
    """The text of the line, or its fault."""


def json_lines(path: Path, key: str, parse: Callable[[dict[str, Any]], T]) -> tuple[list[T], list[BadLine]]:
    """Return `parse` of each line of a JSON lines file, in order, and the lines that it refuses.

    Both lists are empty if the file is missing. An incomplete last line, left by a power cut, is ignored.
    Raises UserError: `path` is no file, or may not be read.
    """
    check_path(path, key)
    if not os.path.exists(path):
        return [], []
    good: list[T] = []
    bad: list[BadLine] = []
    for number, line in enumerate(read_bytes(path, key, "a JSON lines file").split(b"\n")[:-1], start=1):
        try:
            value = parse_json(line, float)
            if not isinstance(value, dict):
                raise TypeError(f"a {type(value).__name__}, no object")
            good.append(parse(value))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            bad.append(
                BadLine(number, f"{shown(line.decode('utf-8', 'replace'), 60)} ({type(error).__name__}: {error})")
            )
    return good, bad


def whole_json_lines(path: Path, key: str, parse: Callable[[dict[str, Any]], T]) -> list[T]:
    """Return `json_lines` of a file in which every line must be usable. Raises `UserError`, which names the first
    unusable line."""
    good, bad = json_lines(path, key, parse)
    if bad:
        remedy = f"Remove {'the line' if len(bad) == 1 else f'it and {len(bad) - 1} more'}."
        raise user_error(f"{key}: line {bad[0].number} of {path}", bad[0].found, "a line as fp8rl writes it", remedy)
    return good


def reason(error: Exception) -> str:
    """Say in a few words why a file cannot be read."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
