import pytest

from numerics.files import publish_directory, write_atomically


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "deep" / "file.json"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert path.read_text() == "two"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.txt"]


def test_a_directory_takes_the_place_of_the_old_one(tmp_path):
    path, partial = tmp_path / "model", tmp_path / ".model.partial"
    path.mkdir()
    (path / "old").touch()
    partial.mkdir()
    (partial / "new").write_text("x")
    publish_directory(partial, path)
    assert [entry.name for entry in path.iterdir()] == ["new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
