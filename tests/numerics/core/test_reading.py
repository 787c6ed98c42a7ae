"""Only regular files are read, and only so much of them; everything else is one message."""

import os
from pathlib import Path

import pytest

from fp8rl.numerics.core.errors import UserError, shown
from fp8rl.numerics.core.reading import check_regular, json_lines, read_bytes, read_json


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_pipes_and_devices_are_refused_at_once(pipe: Path) -> None:
    for path, kind in ((pipe, "a pipe"), (Path("/dev/zero"), "a device")):
        with pytest.raises(UserError, match=f"{kind}, no regular file"):
            read_bytes(path, "spec", "a file")
        with pytest.raises(UserError, match=kind):
            json_lines(path, "sessions", dict)


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert read_bytes(tmp_path / "file", "spec", "a file", largest=100) == b"x" * 100
    with pytest.raises(UserError, match="more than 99 bytes"):
        read_bytes(tmp_path / "file", "spec", "a file", largest=99)


def test_names_that_no_file_can_have_are_refused(tmp_path: Path) -> None:
    for name in ("x" * 300, "a\0b", "y/" * 3000):
        for read in (lambda path: read_bytes(path, "key", "a file"), lambda path: json_lines(path, "key", dict)):
            with pytest.raises(UserError, match="key: found"):
                read(tmp_path / name)


def test_a_directory_that_a_library_is_to_open_has_no_pipe_in_it(pipe: Path) -> None:
    with pytest.raises(UserError, match="data: found '.*pipe: a pipe', expected regular files"):
        check_regular(pipe.parent, "data")
    pipe.unlink()
    (pipe.parent / "link").symlink_to("nowhere")
    check_regular(pipe.parent, "data")


def test_what_is_no_object_and_numbers_without_end_are_said_shortly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"a": ' + "9" * 5000 + "}")
    with pytest.raises(UserError, match="expected valid JSON"):
        read_json(tmp_path / "file", "key", "an object")
    assert shown(1 << 20_000) == "a number of thousands of digits"
