"""`fp8rl study`: what is refused before anything is measured."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fp8rl.numerics.core.errors import UserError
from lab.studies.harness import subjects
from lab.studies.harness.page import for_a_terminal
from lab.studies.harness.study import NAMES
from lab.studies.run import FOLDER, run_studies, run_study
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
    monkeypatch.setattr("lab.studies.run.run_study", lambda *_, **__: pytest.fail("it ran"))
    assert re.match(f"error: {said.replace('?', '[?]')}", refused(arguments))


def test_a_package_without_the_examples_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was installed from a wheel."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subjects, "MODEL", tmp_path / "examples/models/tiny_qwen3_moe")
    said = refused("gemm_error").replace(" ", "")
    assert f"study: found 'no {tmp_path}/examples/models/tiny_qwen3_moe/config.json'".replace(" ", "") in said
    assert "Clone the repository".replace(" ", "") in said
    assert list(tmp_path.iterdir()) == []


def test_results_go_to_any_folder_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path / "checkout", monkeypatch, made_up())
    monkeypatch.chdir(tmp_path)
    chosen = {"every": False, "quick": False, "seeds": None, "keep": False, "say": print}
    assert run_studies([NAME], **chosen, out=tmp_path / "results")
    made = json.loads((tmp_path / "results" / NAME / "results.json").read_text())["made"]
    assert made["commit"] and not made["dirty"]  # the code's, not this folder's
    with pytest.raises(UserError, match="--keep: found 'the folder .*expected the root of the checkout"):
        run_studies([NAME], **(chosen | {"keep": True}))


def test_a_table_of_claims_fits_the_terminal_and_says_its_units(tmp_path: Path) -> None:
    study = replace(made_up(), units={"loss": "nats"})
    result = run_study(study, quick=False, seeds=None, folder=tmp_path, say=print)
    for width in (60, 80, 160):
        console = Console(file=io.StringIO(), width=width)
        console.print(for_a_terminal(result))
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert max(map(len, lines)) <= width
    text = re.sub(r"\s+", " ", " ".join(lines))
    assert "003-16 confirmed (p = 0.0027) +0.11 nats +0.0852 to +0.135 (n = 3)" in text
    assert "×: how many times another arm's value it is." in text


def test_studies_run_once_each_and_in_their_order() -> None:
    from lab.studies.run import studies_named

    assert [study.name for study in studies_named(["bf16", "gemm_error", "bf16"], False)] == ["gemm_error", "bf16"]
    assert [study.name for study in studies_named([], True)] == list(NAMES)


def test_a_run_says_verdicts_and_whether_controls_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for twice, sound, verdict in ((0.0, True, "confirmed (p "), (0.001, False, "none: controls that do not hold")):
        folder = tmp_path / str(sound)
        repository(folder, monkeypatch, made_up(twice))
        console = Console(file=io.StringIO(), width=160)
        assert run_studies([NAME], every=False, quick=False, seeds=None, keep=False, say=console.print) is sound
        said = console.file.getvalue()  # type: ignore[attr-defined]
        assert re.search(rf"003-16 +{re.escape(verdict)}", said)
        assert {path.name for path in (folder / FOLDER / NAME).iterdir()} == {
            *("results.json", "table.md", "index.html", "losses.svg")
        }


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
        (Path("/sys/x"), "/sys, "),
        (tmp_path / "notes", "expected a new folder, or results of a study"),
    ):
        with pytest.raises(UserError, match=f"--out: found .*{why}"):
            run_studies([NAME], every=False, quick=True, seeds=None, keep=False, say=pytest.fail, out=out)
    assert (tmp_path / "notes" / NAME).read_text() == "mine"
