"""What goes into the documentation, in a repository of the test's own: whole, of full runs, from committed code."""

import shutil
from pathlib import Path

import pytest

from fp8rl.numerics.core.errors import UserError
from lab.studies.document import findings
from lab.studies.document.document import PAGE, write_docs
from lab.studies.harness import keeping
from lab.studies.harness.keeping import KEPT, check, kept
from lab.studies.harness.result import RESULTS, provenance
from lab.studies.run import FOLDER, run_studies
from tests.support.studies import NAME, commit, made_up, repository


@pytest.fixture(autouse=True)
def _in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "answers", list)  # the planner's
    repository(tmp_path, monkeypatch, made_up())


def run_and_keep() -> list[str]:
    said: list[str] = []
    run_studies([NAME], every=False, quick=False, seeds=None, keep=True, say=said.append)
    return said


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in (*KEPT.rglob("*"), PAGE) if path.is_file()}


def test_quick_runs_and_changed_files_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(quick=False)
    with pytest.raises(UserError, match="--keep: found '--quick', expected a full run.* Leave one of the two out"):
        check(quick=True)
    (tmp_path / ".gitignore").write_text("changed\n")
    with pytest.raises(UserError, match="--keep: found 'changes that are not committed'.*Commit or stash them first"):
        run_and_keep()
    assert not FOLDER.exists() and not KEPT.exists()
    shutil.rmtree(tmp_path / ".git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UserError, match="--keep: found 'no git checkout'"):
        check(quick=False)


@pytest.mark.slow
def test_results_and_figures_are_kept_and_are_no_change_to_the_checkout(tmp_path: Path) -> None:
    run_and_keep()
    before = contents()
    assert before.keys() == {f"{KEPT}/{NAME}/losses.svg", f"{KEPT}/{NAME}/{RESULTS}", str(PAGE)}
    page = PAGE.read_text()
    assert f"## {NAME}\n\nIs it?" in page and f"![losses](studies/{NAME}/losses.svg)" in page
    assert "| 003-16 | 003-16 it is. | +0.11, +0.0852 to +0.135 (n = 3); **confirmed**" in page
    write_docs()
    assert contents() == before
    commit(tmp_path)
    (KEPT / NAME / RESULTS).write_text("another")
    (KEPT / NAME / "old.svg").write_text("of a figure that is gone")
    assert not provenance()["dirty"]
    run_and_keep()
    (result,) = kept()
    assert result.made["dirty"] is False and result.judged[2].verdict == "confirmed"
    assert contents().keys() == before.keys()
    (tmp_path / ".gitignore").write_text("changed\n")
    assert provenance()["dirty"]


@pytest.mark.slow
def test_controls_that_fail_and_a_copy_that_is_interrupted_leave_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    run_and_keep()
    before, copied = contents(), []
    with monkeypatch.context() as patch:
        patch.setattr("lab.studies.run.load", lambda name: made_up(twice=0.001))
        assert f"{NAME}: not kept, as controls do not hold: same arm twice" in run_and_keep()

    def copy_one(source: Path, target: Path) -> None:
        if copied:
            raise KeyboardInterrupt
        copied.append(target)
        target.write_text("half")

    monkeypatch.setattr(keeping.shutil, "copyfile", copy_one)
    with pytest.raises(KeyboardInterrupt):
        run_and_keep()
    assert copied and contents() == before
    assert [path.name for path in KEPT.iterdir()] == [NAME]
