"""`fp8rl study`: what is refused before anything is measured."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from fp8rl.numerics.core.errors import UserError
from lab.studies.run import FOLDER, run_studies
from tests.support.commands import result_of
from tests.support.paths import ROOT
from tests.support.studies import NAME, made_up, repository


def refused(arguments: str) -> str:
    """What the command line says."""
    result = result_of("study", *arguments.split())
    assert result.exit_code == 2
    return re.sub(r"\s+", " ", result.output)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("gem_error", "study: found 'gem_error', expected one of precision_cases, .* Did you mean gemm_error? Correct"),
        ("gemm_error scales", "study: found 'scales', expected one of .* Did you mean scale_formats? Correct"),
        ("", "study: found 'no name', expected names out of .*, or --all. Say one or the other."),
        ("gemm_error --seeds 1", "--seeds: found 1, expected at least 5 for gemm_error. Raise it."),
        ("gemm_error --quick --seeds 2", "--seeds: found 2, expected at least 3 for gemm_error. Raise it."),
        ("precision_cases failure_modes --seeds 3", "--seeds: found 3, expected at least 5 for failure_modes"),
    ],
)
def test_bad_input_is_one_sentence(arguments: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("lab.studies.run.run_study", lambda *_, **__: pytest.fail("it ran"))
    assert re.match(f"error: {said.replace('?', '[?]')}", refused(arguments))


def test_a_run_says_verdicts_and_whether_controls_hold_and_writes_to_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"every": False, "quick": False, "seeds": None, "keep": False, "out": tmp_path / "results"}
    for twice, sound, verdict in ((0.0, True, "confirmed (p "), (0.001, False, "none: controls that do not hold")):
        repository(tmp_path / str(sound), monkeypatch, made_up(twice))
        monkeypatch.chdir(tmp_path)
        console = Console(file=io.StringIO(), width=160)
        assert run_studies([NAME], **chosen, say=console.print) is sound
        assert re.search(rf"003-16 +{re.escape(verdict)}", console.file.getvalue())  # type: ignore[attr-defined]
        written = {path.name for path in (tmp_path / "results" / NAME).iterdir()}
        assert written == {"results.json", "table.md", "index.html", "losses.svg"}
        made = json.loads((tmp_path / "results" / NAME / "results.json").read_text())["made"]
        assert made["commit"] and not made["dirty"]  # the code's, not this folder's
    with pytest.raises(UserError, match="--keep: found 'the folder .*expected the root of the checkout"):
        run_studies([NAME], **(chosen | {"keep": True}), say=print)


def test_a_study_that_cannot_be_written_is_refused_before_the_first_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository(tmp_path, monkeypatch, made_up())
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / NAME).write_text("mine")
    FOLDER.parent.mkdir()
    FOLDER.write_text("a file")
    for out, why in (
        (FOLDER, "studies, which is no directory"),
        (Path("/proc/x"), "/proc, "),
        (tmp_path / "notes", "expected a new folder, or results of a study"),
    ):
        with pytest.raises(UserError, match=f"--out: found .*{why}"):
            run_studies([NAME], every=False, quick=True, seeds=None, keep=False, say=pytest.fail, out=out)
    assert (tmp_path / "notes" / NAME).read_text() == "mine"
