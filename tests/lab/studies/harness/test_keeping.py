"""What goes into the documentation, in a repository of the test's own: whole, of full runs, from committed code."""

import json
import shutil
from pathlib import Path

import pytest

from fp8rl.numerics.core.errors import UserError
from lab.studies.document import findings
from lab.studies.document.document import PAGE, write_docs
from lab.studies.harness import keeping
from lab.studies.harness.claims import Claim
from lab.studies.harness.keeping import KEPT, check, kept
from lab.studies.harness.result import RESULTS, provenance
from lab.studies.run import FOLDER, run_studies
from tests.support.studies import NAME, commit, made_up, repository


@pytest.fixture(autouse=True)
def no_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "answers", list)


def run_and_keep() -> list[str]:
    said: list[str] = []
    run_studies([NAME], every=False, quick=False, seeds=None, keep=True, say=said.append)
    return said


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in (*KEPT.rglob("*"), PAGE) if path.is_file()}


def test_quick_runs_and_changed_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path, monkeypatch, made_up())
    check(quick=False)
    with pytest.raises(UserError, match="--keep: found '--quick', expected a full run.* Leave one of the two out"):
        check(quick=True)
    (tmp_path / ".gitignore").write_text("changed\n")
    with pytest.raises(UserError, match="--keep: found 'changes that are not committed'.*Commit or stash them first"):
        check(quick=False)
    commit(tmp_path)
    check(quick=False)
    shutil.rmtree(tmp_path / ".git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UserError, match="--keep: found 'no git checkout'"):
        check(quick=False)


def test_a_refused_run_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path, monkeypatch, made_up())
    (tmp_path / ".gitignore").write_text("changed\n")
    with pytest.raises(UserError, match="--keep"):
        run_and_keep()
    assert not FOLDER.exists() and not KEPT.exists()


@pytest.mark.slow
def test_results_and_figures_are_kept_and_the_page_is_written_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository(tmp_path, monkeypatch, made_up())
    run_and_keep()
    assert contents().keys() == {f"{KEPT}/{NAME}/losses.svg", f"{KEPT}/{NAME}/{RESULTS}", str(PAGE)}
    page = PAGE.read_text()
    assert f"## {NAME}\n\nIs it?" in page and f"![losses](studies/{NAME}/losses.svg)" in page
    assert "| 003-16 | 003-16 it is. | +0.11, +0.0852 to +0.135 (n = 3); **confirmed**" in page
    before = contents()
    write_docs()
    assert contents() == before


@pytest.mark.slow
def test_what_was_kept_is_no_change_to_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path, monkeypatch, made_up())
    run_and_keep()
    commit(tmp_path)
    (KEPT / NAME / RESULTS).write_text("another")
    PAGE.write_text("another")
    assert not provenance()["dirty"]
    run_and_keep()
    (result,) = kept()
    assert result.made["dirty"] is False and result.judged[2].verdict == "confirmed"
    (tmp_path / ".gitignore").write_text("changed\n")
    assert provenance()["dirty"]


@pytest.mark.slow
def test_controls_that_fail_are_said_and_what_was_kept_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path, monkeypatch, made_up())
    run_and_keep()
    before = contents()
    broken = made_up(twice=0.001)
    monkeypatch.setattr("lab.studies.run.load", lambda name: broken)
    said: list[str] = []
    assert not run_studies([NAME], every=False, quick=False, seeds=None, keep=True, say=said.append)
    assert f"{NAME}: not kept, as controls do not hold: same arm twice" in said
    assert contents() == before


def test_files_that_change_while_studies_run_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path, monkeypatch, made_up())
    checked = keeping.check

    def check_then_change(quick: bool) -> None:
        checked(quick)
        (tmp_path / ".gitignore").write_text("changed\n")

    monkeypatch.setattr(keeping, "check", check_then_change)
    assert f"{NAME}: not kept, as files were changed before it began" in run_and_keep()
    assert not KEPT.exists()


@pytest.mark.slow
def test_a_copy_that_is_interrupted_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path, monkeypatch, made_up())
    run_and_keep()
    before = contents()
    copied: list[Path] = []

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


@pytest.mark.slow
def test_a_later_keep_replaces_the_figures_that_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path, monkeypatch, made_up())
    run_and_keep()
    (KEPT / NAME / "old.svg").write_text("<svg/>")
    run_and_keep()
    assert not (KEPT / NAME / "old.svg").exists()


def test_claims_that_were_changed_after_their_measurement_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path, monkeypatch, made_up())
    run_and_keep()
    path = KEPT / NAME / RESULTS
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"claims_digest": "0" * 16}))
    assert "claims were changed" not in PAGE.read_text()
    write_docs()
    assert "**The claims were changed after they were measured.**" in PAGE.read_text()


@pytest.mark.slow
def test_a_claim_that_came_later_waits_for_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path, monkeypatch, made_up())
    run_and_keep()
    more = made_up(
        more=[Claim(id="003-17", says="One more.", metric="loss", arm="a new arm", rule="above", bounds=(0.0,))]
    )
    monkeypatch.setattr(keeping, "load", lambda name: more)
    (result,) = kept()
    assert result.claims_changed and [judged.claim.id for judged in result.judged][2:] == ["003-16"]
