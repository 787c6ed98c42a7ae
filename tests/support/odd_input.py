"""Input that is wrong in the ways that files, values and places can be: drawn from a generator, so always the same."""

import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

DEEP = "[" * 3000 + "]" * 3000
BIG, HUGE = "9" * 400, "9" * 5000
VALUES: list[Any] = [
    None, True, False, 0, -1, 2**31, 2**63, 10**400, -(10**400), 0.0, -0.5, 1e308, float("nan"), float("inf"), "", "x",
    "\0", "a\0b", "é", "[/b]", "\ud800", "x" * 5000, "../..", "/dev/zero", "${run.name}", "${", "null", "1", [], [None],
    [[]], ["x"], [1], [{}], {}, {"a": 1}, {"a": {"b": {}}}, [[[[[]]]]],
]  # fmt: skip
TEXTS = [
    "", "=", "x", "null", "~", "[", "{", "[[]]", "{a: b}", "!!python/object/apply:os.system [ls]", "!!binary x",
    "!!timestamp x", "!!set {a}", "!!int 0x", "0x", "1e400", ".nan", "-.inf", BIG, "-" + BIG, HUGE, "2026-01-01",
    "190:20:30", "yes", "a\0b", '"a\\0b"', '["a\\0b"]', '"x.py:a\\0b"', '"\\ud800"', "\x1b[31m", "x" * 5000, "/" * 5000,
    "/dev/zero", "/", "${run.name}", "${run}", "${", "${oc.env:HOME}", "&a [*a]", "&a {b: *a}", "*a", "<<: x", "- x",
    "'", "%", "@x", "|", "[/b]", "{}", "[null]", "[{}]", "x.py:y", "os:system", ":", ".py:", DEEP, "[" * 60 + "]" * 60,
]  # fmt: skip
"""What may be written behind a key of YAML."""
PIECES = [
    b"\0", b"\xff", b"[", b"{", b"!!python/object:os.system ", b"&a ", b"*a", b"\t", BIG.encode(), b"NaN", b'"', b": ",
]  # fmt: skip


def flipped(data: bytes, draw: Random) -> bytes:
    """Bytes of which some are others, missing, doubled or new."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5, 20])):
        at = draw.randrange(len(changed) + 1)
        match draw.randrange(5):
            case 0:
                changed[at : at + 1] = draw.randbytes(1)
            case 1:
                del changed[at : at + draw.randrange(1, 30)]
            case 2:
                changed[at:at] = draw.choice(PIECES)
            case 3:
                del changed[at:]
            case 4:
                changed[at:at] = changed[: draw.randrange(1, 60)]
    return bytes(changed)


def changed(value: Any, draw: Random) -> Any:
    """A value of JSON in which one part, somewhere, is missing or another."""
    value = json.loads(json.dumps(value))
    *before, last = draw.choice([path for path in _paths(value) if path])
    inner = value
    for part in before:
        inner = inner[part]
    if draw.random() < 0.15:
        del inner[last]
    else:
        inner[last] = draw.choice([*VALUES, nested(150)])
    return value


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def with_header(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Give a safetensors file another header."""
    data = file.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.dumps(change(json.loads(data[8:end]))).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + data[end:])


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's address is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo, "socket": _socket, "directory": Path.mkdir, "endless": lambda path: path.symlink_to("/dev/zero"),
    "full": lambda path: path.symlink_to("/dev/full"), "nowhere": lambda path: path.symlink_to("/nowhere/x"),
    "itself": lambda path: path.symlink_to(path.name), "missing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""), "zeros": lambda path: path.write_bytes(bytes(100)),
    "deep": lambda path: path.write_text(DEEP), "list": lambda path: path.write_text("[]"),
    "number": lambda path: path.write_text('{"a": ' + HUGE + "}"),
    "latin": lambda path: path.write_bytes(b'{"a": "\xff"}'),
}  # fmt: skip
"""What may stand in place of a file, and how it gets there."""


def places(folder: Path) -> list[str | Path]:
    """Where no new file or folder can be, or none should: one of each kind is made in the folder."""
    for name in ("file", "full/x"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    for name, target in (("nowhere", "/nowhere/x"), ("itself", "itself"), ("link", "file"), ("device", "/dev/full")):
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe")
    own = ["full", "nowhere", "itself", "link", "device", "pipe", "file/x", "itself/x", "n" * 256]
    found: list[str | Path] = [folder / name for name in own]
    return [*found, "/proc/x", "/dev/null", "/dev/full/x", "/sys/x", "x/" * 3000, "a\0b", "/"]


def _paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield before
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _paths(part, (*before, key))
