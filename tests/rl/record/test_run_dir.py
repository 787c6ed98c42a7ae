"""Where a run lies, who may work on it, and what becomes of one that never began."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.core.files import write_atomically
from fp8rl.rl.record.run_dir import RunDir, open_run_dir
from tests.support.paths import ROOT, new_run


def files(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def old_run(folder: Path, rows: str = "{}\n") -> RunDir:
    run = new_run(folder / "demo")
    run.experiment.write_text(yaml.safe_dump({"run": {"name": "demo"}}))
    run.metrics.write_text(rows)
    write_atomically(run.manifest(3), "{}")
    return run


def opened(folder: Path, name: str = "demo", **flags: bool) -> RunDir:
    with open_run_dir(folder, name, **flags) as run:
        return run


def test_an_existing_run_is_not_touched_without_a_flag(tmp_path: Path) -> None:
    run = old_run(tmp_path)
    for rows, folder in (("{}\n", None), ("", run.checkpoint(3)), ("", run.model)):
        run.metrics.write_text(rows)
        if folder is not None:
            folder.mkdir(parents=True)
        before = files(tmp_path)
        with pytest.raises(UserError, match=r"existing run.*run\.name=.*--resume.*--overwrite"):
            opened(tmp_path)
        assert files(tmp_path) == before
        if folder is not None:
            folder.rmdir()


def test_resume_keeps_and_overwrite_renames(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = old_run(tmp_path)
    (run.path / "notes.md").touch()
    assert opened(tmp_path, resume=True).path == run.path
    kept = files(run.path)
    assert {"manifests/step_3.json", "notes.md"} < {*kept}
    assert opened(tmp_path, overwrite=True).path == run.path
    assert files(run.path) == [".fp8rl"]
    (replaced,) = tmp_path.glob("demo.replaced-*")
    assert f"note: the earlier {run.path} is now {replaced.name}" in capsys.readouterr().err
    assert files(replaced) == kept


def test_what_a_resumed_run_repeats_is_removed_and_nothing_else(tmp_path: Path) -> None:
    run = new_run(tmp_path / "demo")
    for step in (0, 5, 6, 15):
        for path in (run.rollouts(step), run.ahead(step), run.manifest(step)):
            write_atomically(path, "{}")
    for name in ("step_6.certify.html", "step_7.certify.html", "step_7.notes", "step_8.jsonl.old"):
        write_atomically(run.path / "rollouts" / name, "")
    run.cut(5)
    kept = ["rollouts/ahead_0.jsonl", "rollouts/ahead_5.jsonl", "rollouts/step_0.jsonl", "rollouts/step_5.jsonl"]
    others = ["rollouts/step_7.notes", "rollouts/step_8.jsonl.old"]
    assert files(run.path) == [
        *["manifests", "manifests/step_0.json", "manifests/step_5.json", "rollouts"],
        *sorted(kept + others),
    ]
    run.cut(-1)
    left = ["manifests", "rollouts", *others]
    assert files(run.path) == left, "as a run without a checkpoint begins again"


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError])
def test_a_start_that_reached_no_step_leaves_its_logs_for_the_next(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), open_run_dir(tmp_path / "runs", "demo") as run:
        run.experiment.write_text("{}")
        raise error
    assert opened(tmp_path / "runs").path == run.path
    assert files(tmp_path) == ["runs", "runs/demo", "runs/demo/.fp8rl", "runs/demo/spec.yaml"]
    with pytest.raises(error), open_run_dir(tmp_path / "runs", "demo") as run:
        run.metrics.write_text("{}\n")
        raise error
    assert "runs/demo/metrics.jsonl" in files(tmp_path)


def test_what_a_run_is_made_from_is_not_renamed(tmp_path: Path) -> None:
    run = old_run(tmp_path)
    with (
        pytest.raises(UserError, match="an input of this run"),
        open_run_dir(tmp_path, "demo", overwrite=True, reads=[run.path / "capsules/step_3/spec.yaml"]),
    ):
        pass
    assert run.metrics.exists()


@pytest.mark.parametrize(("shared", "mode"), [(False, 0o700), (True, 0o755)])
def test_a_new_run_is_its_owners_unless_it_is_shared(tmp_path: Path, shared: bool, mode: int) -> None:
    with open_run_dir(tmp_path / "runs", "demo", shared=shared) as run:
        assert run.path == tmp_path / "runs" / "demo" and run.path.stat().st_mode & 0o777 == mode
        assert files(run.path) == [".fp8rl"]
    assert files(tmp_path) == ["runs", "runs/demo", "runs/demo/.fp8rl"], "and the lock is gone"


@pytest.mark.parametrize("kind", ["link", "text"])
def test_a_file_of_the_locks_name_is_not_cut(tmp_path: Path, kind: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    lock = tmp_path / ".demo.lock"
    if kind == "link":
        lock.symlink_to(precious)
    else:
        lock.write_text("mine")
    with pytest.raises(UserError, match=r"\.demo\.lock"):
        opened(tmp_path)
    assert lock.read_text() == "mine"


def test_what_is_no_run_is_never_renamed_or_resumed(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"x")
    (tmp_path / "link").symlink_to("photos")
    (tmp_path / "file").write_text("")
    before = files(tmp_path)
    for flags in ({"overwrite": True}, {}):
        with pytest.raises(UserError, match=r"without a spec\.yaml"):
            opened(tmp_path, "photos", **flags)
        with pytest.raises(UserError, match="found a link"):
            opened(tmp_path, "link", **flags)
        with pytest.raises(UserError, match="found a file"):
            opened(tmp_path, "file", **flags)
    for name in ("photos", "absent"):
        with pytest.raises(UserError, match="found no run"):
            opened(tmp_path, name, resume=True)
    with pytest.raises(UserError, match="found both"):
        opened(tmp_path, "photos", resume=True, overwrite=True)
    assert files(tmp_path) == before


@contextmanager
def driver_of(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that works on the run."""
    program = f"""
from fp8rl.rl.record.run_dir import open_run_dir
with open_run_dir({str(folder)!r}, "demo") as run:
    run.experiment.write_text("{{}}")
    run.metrics.write_text("{{}}\\n")
    print("holding", flush=True)
    input()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None and process.stdout.readline() == "holding\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_a_live_run_is_nobody_elses(tmp_path: Path, flags: dict[str, bool]) -> None:
    with driver_of(tmp_path) as driver:
        before = files(tmp_path)
        with pytest.raises(UserError, match=rf"held by process {driver.pid} on "):
            opened(tmp_path, **flags)
        assert files(tmp_path) == before


def test_the_lock_of_a_killed_driver_holds_nothing(tmp_path: Path) -> None:
    with driver_of(tmp_path):
        pass
    assert (tmp_path / ".demo.lock").is_file()
    assert opened(tmp_path, resume=True).metrics.is_file()
    assert not (tmp_path / ".demo.lock").exists()


@pytest.mark.slow
def test_of_many_that_start_at_once_one_wins(tmp_path: Path) -> None:
    """Each holds the run for a moment; never two together, and the lock's removal lets none slip past."""
    program = f"""
import os, sys
from pathlib import Path
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.record.run_dir import open_run_dir
inside = Path({str(tmp_path)!r}) / "inside"
won = 0
while won < 50:
    try:
        with open_run_dir({str(tmp_path)!r}, "demo"):
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
            won += 1
            inside.unlink()
    except UserError:
        pass
"""
    racers = [subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) for _ in range(4)]
    assert [racer.wait() for racer in racers] == [0] * 4 and os.listdir(tmp_path) == ["demo"]
