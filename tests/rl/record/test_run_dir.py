from pathlib import Path

import pytest
import yaml

from numerics.errors import UserError
from numerics.files import write_atomically
from rl.record.run_dir import create_run_dir


def files(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def test_a_new_run_gets_its_directory(tmp_path: Path) -> None:
    run = create_run_dir(tmp_path / "runs", "demo")
    assert run.path == tmp_path / "runs" / "demo"
    assert run.path.is_dir() and files(run.path) == []
    assert run.name == "demo"


def test_an_empty_directory_is_taken_as_new(tmp_path: Path) -> None:
    create_run_dir(tmp_path, "demo")
    create_run_dir(tmp_path, "demo")


def test_an_existing_run_is_not_touched_without_a_flag(tmp_path: Path) -> None:
    run = create_run_dir(tmp_path, "demo")
    run.experiment.write_text(yaml.safe_dump({"run": {"name": "demo"}}))
    with pytest.raises(UserError, match=r"existing run.*run\.name=.*--resume.*--overwrite"):
        create_run_dir(tmp_path, "demo")
    assert files(run.path) == ["spec.yaml"]


def test_resume_keeps_and_overwrite_deletes(tmp_path: Path) -> None:
    run = create_run_dir(tmp_path, "demo")
    run.experiment.write_text(yaml.safe_dump({}))
    write_atomically(run.manifest(3), "{}")
    assert create_run_dir(tmp_path, "demo", resume=True) == run
    assert run.manifest(3).is_file()
    assert create_run_dir(tmp_path, "demo", overwrite=True) == run
    assert files(run.path) == []


def test_what_is_no_run_is_never_deleted_or_resumed(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"x")
    with pytest.raises(UserError, match=r"without a spec\.yaml"):
        create_run_dir(tmp_path, "photos", overwrite=True)
    with pytest.raises(UserError, match="found no run"):
        create_run_dir(tmp_path, "photos", resume=True)
    with pytest.raises(UserError, match="found no run"):
        create_run_dir(tmp_path, "absent", resume=True)
    with pytest.raises(UserError, match="found both"):
        create_run_dir(tmp_path, "photos", resume=True, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="found a file"):
        create_run_dir(tmp_path, "file")
    assert files(tmp_path) == ["file", "photos", "photos/cat.jpg"]


def test_steps_are_listed_without_unfinished_ones(tmp_path: Path) -> None:
    run = create_run_dir(tmp_path, "demo")
    assert run.checkpoint_steps() == run.rollout_steps() == []
    for step in (20, 100, 3):
        run.checkpoint(step).mkdir(parents=True)
        write_atomically(run.rollouts(step), "")
    (run.checkpoints / ".step_120.tmp").mkdir()
    (run.checkpoints / "step_7.old").mkdir()
    assert run.checkpoint_steps() == run.rollout_steps() == [3, 20, 100]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sub" / "file.txt"
    write_atomically(path, "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("numerics.files.os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert files(tmp_path / "sub") == ["file.txt"]
