"""Only regular files are read, and only so much of them; everything else is one message."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8rl.numerics.core.errors import UserError, shown
from fp8rl.numerics.core.files import (
    append_line,
    check_page,
    file_sha256,
    new_directory,
    publish_directory,
    write_atomically,
    writing,
)
from fp8rl.numerics.core.reading import check_regular, json_lines, read_bytes, read_json
from tests.support.disks import room


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "deep" / "file.json"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert path.read_text() == "two"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


def test_a_file_has_the_digest_of_fips_180(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert file_sha256(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.txt"]


def test_published_weights_are_as_readable_as_their_directory(tmp_path):
    for mode in (0o750, 0o700):
        partial = tmp_path / ".model.partial"
        partial.mkdir()
        save_file({"a": torch.ones(2)}, partial / "model.safetensors")
        partial.chmod(mode)
        publish_directory(partial, tmp_path / "model")
        assert (tmp_path / "model" / "model.safetensors").stat().st_mode & 0o777 == mode & 0o666


def test_a_directory_takes_the_place_of_the_old_one(tmp_path):
    path, partial = tmp_path / "model", tmp_path / ".model.partial"
    path.mkdir()
    (path / "old").touch()
    partial.mkdir()
    (partial / "new").write_text("x")
    publish_directory(partial, path)
    assert [entry.name for entry in path.iterdir()] == ["new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("before", "after"), [(None, "b\n"), ("", "b\n"), ("a\n", "a\nb\n"), ('{"to', '{"to\nb\n')])
def test_a_line_is_appended_whole_whatever_stands_before(tmp_path: Path, before: str | None, after: str) -> None:
    path = tmp_path / "lines"
    if before is not None:
        path.write_text(before)
    append_line(path, "b")
    assert path.read_text() == after


def test_a_line_that_a_full_disk_cuts_off_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, "a" * 50)
    message = r"lines: found '.*' with \d+ MiB free, expected room to write it\. Free some"
    with room(80), pytest.raises(OSError, match=message):
        append_line(path, "b" * 50)
    assert path.read_text() == "a" * 50 + "\n"
    append_line(path, "c")
    assert path.read_text().splitlines() == ["a" * 50, "c"]


def test_a_full_disk_leaves_the_old_directory_and_nothing_else(tmp_path: Path) -> None:
    with new_directory(tmp_path / "model") as partial:
        (partial / "old").touch()
    message = "model: found .* expected room"
    with room(20_000), pytest.raises(OSError, match=message), new_directory(tmp_path / "model") as partial:
        save_file({"a": torch.zeros(10_000)}, partial / "model.safetensors")
    assert [str(entry.relative_to(tmp_path)) for entry in tmp_path.rglob("*")] == ["model", "model/old"]


def test_a_page_replaces_a_page_alone(tmp_path: Path) -> None:
    for name in ("page.html", "spec.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "link.html").symlink_to("page.html")
    (tmp_path / "folder.html").mkdir()
    os.mkfifo(tmp_path / "pipe.html")
    for place in ("page.html", "new/folder/page"):
        check_page(tmp_path / place, "--page")
    places = {"link": "a link", "folder": "a directory", "pipe": "no page"}
    others = {"spec.yaml": "no page", "page.html/x": "no directory"}
    for place, kind in {**{f"{name}.html": kind for name, kind in places.items()}, **others}.items():
        with pytest.raises(UserError, match=f"--page: found .*{kind}"):
            check_page(tmp_path / place, "--page")


def test_what_keeps_a_file_from_being_written_is_one_sentence() -> None:
    with pytest.raises(UserError, match="OUT: found '/proc/x: .*', expected a place that can be written to"):
        with writing(Path("/proc/x"), "OUT"):
            write_atomically(Path("/proc/x"), "")


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
