"""The command of the benchmarks."""

from __future__ import annotations

import json
import pkgutil
import sys
from pathlib import Path

import pytest

import lab.bench.__main__ as bench_module
from lab.bench import runs
from lab.bench.__main__ import BENCHMARKS, main
from tests.support.tiny_model import TinyModel


def test_an_unknown_benchmark_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "rollouts"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "found ['rollouts'], expected names out of" in capsys.readouterr().err


def test_every_benchmark_is_there() -> None:
    assert all(callable(pkgutil.resolve_name(call)) for calls in BENCHMARKS.values() for call in calls)


def test_every_architecture_meets_an_engine_in_whole_runs() -> None:
    """Those that the suite leaves to them, too."""
    assert {model.family for model in runs.MODELS.values()} == set(TinyModel.families())


@pytest.mark.slow
def test_a_benchmark_that_fails_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_module, "BENCHMARKS", {"half": ("tests.support.gpu_parts:half",)})
    monkeypatch.setattr(bench_module, "ROWS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(bench_module, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert main() == 1
    said = capfd.readouterr()
    assert "the first half" in said.out and "no room on the disk" in said.err and "failed: half" in said.err
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["result"]["name"] for line in lines if "result" in line] == ["the first half"]
    assert not (tmp_path / "results.json").exists(), "the last whole measurement stays"
