"""The command of the benchmarks."""

from __future__ import annotations

import sys

import pytest

from bench.__main__ import main


def test_an_unknown_benchmark_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "rollouts"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "found ['rollouts'], expected names out of" in capsys.readouterr().err
