"""The command of the benchmarks."""

from __future__ import annotations

import pkgutil
import sys

import pytest

from lab.bench import runs
from lab.bench.__main__ import BENCHMARKS, main
from tests.support.tiny_model import TinyModel


def test_an_unknown_benchmark_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "rollouts"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "found ['rollouts'], expected names out of" in capsys.readouterr().err


def test_every_benchmark_is_there_and_every_architecture_meets_an_engine_in_whole_runs() -> None:
    """Those that the suite leaves to them, too."""
    assert all(callable(pkgutil.resolve_name(call)) for calls in BENCHMARKS.values() for call in calls)
    assert {model.family for model in runs.MODELS.values()} == set(TinyModel.families())
