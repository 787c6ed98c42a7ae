"""Files are written whole; only regular ones are read, and only so much of them; everything else is one message."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8rl.numerics.core.errors import UserError, printable, say, shown
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


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_atomically(path, "one")
    write_atomically(path, "abc")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "abc" and [entry.name for entry in path.parent.iterdir()] == ["file.txt"]
    assert file_sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", "as in FIPS 180"


@pytest.mark.parametrize("mode", [0o750, 0o700])
def test_a_directory_takes_the_place_of_the_old_one_and_is_as_readable(tmp_path: Path, mode: int) -> None:
    path, partial = tmp_path / "model", tmp_path / ".model.partial"
    path.mkdir()
    (path / "old").touch()
    partial.mkdir()
    save_file({"a": torch.ones(2)}, partial / "model.safetensors")
    partial.chmod(mode)
    publish_directory(partial, path)
    assert [entry.name for entry in path.iterdir()] == ["model.safetensors"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert (path / "model.safetensors").stat().st_mode & 0o777 == mode & 0o666


@pytest.mark.parametrize(("before", "after"), [(None, "b\n"), ("", "b\n"), ("a\n", "a\nb\n"), ('{"to', '{"to\nb\n')])
def test_a_line_is_appended_whole_whatever_stands_before(tmp_path: Path, before: str | None, after: str) -> None:
    path = tmp_path / "lines"
    if before is not None:
        path.write_text(before)
    append_line(path, "b")
    assert path.read_text() == after


def test_a_full_disk_takes_back_a_line_and_leaves_the_old_directory_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, "a" * 50)
    message = r"lines: found '.*' with \d+ MiB free, expected room to write it\. Free some"
    with room(80), pytest.raises(OSError, match=message):
        append_line(path, "b" * 50)
    append_line(path, "c")
    assert path.read_text().splitlines() == ["a" * 50, "c"]
    path.unlink()
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
    odd = {"link.html": "a link", "folder.html": "a directory", "pipe.html": "no page"}
    for place, kind in (odd | {"spec.yaml": "no page", "page.html/x": "no directory"}).items():
        with pytest.raises(UserError, match=f"--page: found .*{kind}"):
            check_page(tmp_path / place, "--page")
    with pytest.raises(UserError, match="OUT: found '/proc/x: .*', expected a place that can be written to"):
        with writing(Path("/proc/x"), "OUT"):
            write_atomically(Path("/proc/x"), "")


def test_pipes_devices_and_impossible_names_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    odd = {tmp_path / "pipe": "a pipe, no regular file", Path("/dev/zero"): "a device, no regular file"}
    for path, kind in {**odd, **{tmp_path / name: "" for name in ("x" * 300, "a\0b", "y/" * 3000)}}.items():
        with pytest.raises(UserError, match=f"key: found.*{kind}"):
            read_bytes(path, "key", "a file")
        with pytest.raises(UserError, match=f"key: found.*{kind}"):
            json_lines(path, "key", dict)
    with pytest.raises(UserError, match="data: found '.*pipe: a pipe', expected regular files"):
        check_regular(tmp_path, "data")
    (tmp_path / "pipe").unlink()
    (tmp_path / "link").symlink_to("nowhere")
    check_regular(tmp_path, "data")


def test_a_file_is_read_up_to_a_limit_and_numbers_without_end_are_said_shortly(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert read_bytes(tmp_path / "file", "spec", "a file", largest=100) == b"x" * 100
    with pytest.raises(UserError, match="more than 99 bytes"):
        read_bytes(tmp_path / "file", "spec", "a file", largest=99)
    (tmp_path / "file").write_text('{"a": ' + "9" * 5000 + "}")
    with pytest.raises(UserError, match="expected valid JSON"):
        read_json(tmp_path / "file", "key", "an object")
    assert shown(1 << 20_000) == "a number of thousands of digits"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\tb\nc é 漢 [/b] :smile:", "a\tb\nc é 漢 [/b] :smile:"), ("\x1b[2J\x1b]0;title\x07", "�[2J�]0;title�"),
     ("right\rwrong\x08\x7f", "right�wrong��"), ("\x9b31m", "�31m"), ("abc\u202etxt.exe\u2066", "abc�txt.exe�"),
     ("\udc80", "?")],
)  # fmt: skip
def test_a_character_that_a_terminal_would_obey_is_replaced(text, shown, capsys) -> None:
    assert printable(text) == shown
    say(text)
    assert capsys.readouterr().out == shown + "\n"
