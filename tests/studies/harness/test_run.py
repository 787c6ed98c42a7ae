"""`fp8rl study`: what is refused before anything is measured."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fp8rl.cli import app
from numerics.errors import UserError
from studies.harness.names import NAMES
from studies.harness.run import FOLDER, run_studies
from tests.support.paths import ROOT
from tests.support.studies import NAME, made_up, repository


def refused(arguments: str) -> str:
    """What the command line says."""
    result = CliRunner().invoke(app, ["study", *arguments.split()])
    assert result.exit_code == 2
    return re.sub(r"\s+", " ", result.output)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("gem_error", "study: found 'gem_error', expected one of precision_cases, .* Did you mean gemm_error? Correct"),
        ("gemm_error scales", "study: found 'scales', expected one of .* Did you mean scale_formats? Correct"),
        ("", "study: found 'no name', expected names out of .*, or --all. Say one or the other."),
        ("gemm_error --all", "study: found 'names and --all', expected names out of .*, or --all. Say one"),
        ("gemm_error --seeds 1", "--seeds: found 1, expected at least 5 for gemm_error. Raise it."),
        ("gemm_error --quick --seeds 2", "--seeds: found 2, expected at least 3 for gemm_error. Raise it."),
        ("gemm_error --seeds 0", "--seeds: found 0, expected at least 5"),
        ("precision_cases failure_modes --seeds 3", "--seeds: found 3, expected at least 5 for failure_modes"),
        ("gemm_error --keep --quick", "--keep: found '--quick', expected a full run, which alone gives verdicts."),
    ],
)
def test_bad_input_is_one_sentence(arguments: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("studies.harness.run.run_study", lambda *_, **__: pytest.fail("it ran"))
    assert re.match(f"error: {said.replace('?', '[?]')}", refused(arguments))


def test_elsewhere_than_in_the_repository_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused("gemm_error") == (
        "error: study: found 'no examples/models/tiny_qwen3_moe here', expected the repository's root, with the model "
        "that is studied. Change there. "
    )
    assert list(tmp_path.iterdir()) == []


def test_studies_run_once_each_and_in_their_order() -> None:
    from studies.harness.run import studies_named

    assert [study.name for study in studies_named(["bf16", "gemm_error", "bf16"], False)] == ["gemm_error", "bf16"]
    assert [study.name for study in studies_named([], True)] == list(NAMES)


def test_a_run_says_verdicts_and_whether_controls_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for twice, sound, verdict in ((0.0, True, "confirmed (p "), (0.001, False, "none: controls that do not hold")):
        folder = tmp_path / str(sound)
        repository(folder, monkeypatch, made_up(twice))
        said: list[str] = []
        assert run_studies([NAME], every=False, quick=False, seeds=None, keep=False, say=said.append) is sound
        assert any(line.startswith(f"  003-16: {verdict}") for line in said)
        assert {path.name for path in (folder / FOLDER / NAME).iterdir()} == {
            *("results.json", "table.md", "index.html", "losses.svg")
        }


def test_a_study_that_cannot_be_written_is_refused_before_the_first_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository(tmp_path, monkeypatch, made_up())
    FOLDER.parent.mkdir()
    FOLDER.write_text("a file")
    with pytest.raises(UserError, match="study: found .*studies, which is no directory"):
        run_studies([NAME], every=False, quick=True, seeds=None, keep=False, say=pytest.fail)
