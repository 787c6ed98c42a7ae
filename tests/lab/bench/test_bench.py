"""The command of the benchmarks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import lab.bench.__main__ as bench_module
from lab.bench.__main__ import main
from lab.bench.measure import Result


def test_an_unknown_benchmark_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "rollouts"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "found ['rollouts'], expected names out of" in capsys.readouterr().err


def test_a_benchmark_that_fails_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def half() -> Iterator[Result]:
        yield Result("the first half", 1.0, 2.0, False, {"seconds": 3.0})
        raise RuntimeError("no room on the disk")

    for name, run in {"half": half, "whole": lambda: [Result("a whole", 1.0, 2.0, False, {})]}.items():
        module = ModuleType(name)
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"bench.{name}", module)
    monkeypatch.setattr(bench_module, "BENCHMARKS", ("half", "whole"))
    monkeypatch.setattr(bench_module, "in_own_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(bench_module, "ROWS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(bench_module, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert main() == 1
    said = capsys.readouterr()
    assert "the first half" in said.out and "a whole" in said.out
    assert "no room on the disk" in said.err and "failed: half" in said.err
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == ["the first half", "a whole"]
    assert not (tmp_path / "results.json").exists(), "the last whole measurement stays"
