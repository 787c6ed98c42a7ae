"""Submitting to a cluster that is not there; one that is there is in tests/e2e."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import rl.run.cluster.submission
from fp8rl.cli import app
from tests.support.paths import EXAMPLES

SPEC = str(EXAMPLES / "arithmetic.yaml")


def typed(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["submit", *arguments])
    return result.exit_code, result.output


def test_a_cluster_that_does_not_answer_is_one_message() -> None:
    code, said = typed(SPEC, "--address", "http://127.0.0.1:9")
    assert code == 2 and said.startswith("error: --address: found 'http://127.0.0.1:9") and "ray start --head" in said


def test_a_spec_that_would_be_refused_is_refused_here() -> None:
    code, said = typed(SPEC, "run.stepz=3", "--address", "http://127.0.0.1:9")
    assert code == 2 and "run.stepz" in said


def test_what_is_typed_here_is_typed_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entrypoints: list[str] = []

    class Client:
        def __init__(self, address: str) -> None: ...

        def submit_job(self, entrypoint: str) -> str:
            entrypoints.append(entrypoint)
            return "job-1"

    monkeypatch.setattr(rl.run.cluster.submission, "JobSubmissionClient", Client)
    folder = tmp_path / "with space"
    folder.mkdir()
    monkeypatch.chdir(folder)
    code, said = typed(SPEC, "run.name=a", "--address", "http://x:1", "--resume")
    assert code == 0 and "ray job stop --address http://x:1 job-1" in said
    (entrypoint,) = entrypoints
    assert entrypoint.startswith(f"cd '{folder}' && exec ") and entrypoint.endswith(
        f"fp8rl train {SPEC} run.name=a --resume"
    )
