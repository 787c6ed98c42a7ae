"""A model behind an engine of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8rl import serving
from fp8rl.diagnose.subject import read_served
from fp8rl.rl.run.kernels import ServedModel
from tests.support.paths import ROOT


class _StartedError(Exception):
    pass


def test_kernels_are_compiled_before_an_engine_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def start(*_: Any, **__: Any) -> Any:
        asked.append("engine")
        raise _StartedError

    monkeypatch.setattr(serving, "own_capability", lambda: (9, 0))
    monkeypatch.setattr(serving, "warm_once", lambda model, capability, say: asked.append((model, capability)))
    monkeypatch.setattr(serving.SGLangServer, "start", start)
    served = read_served(ROOT / "examples/models/tiny_qwen3_moe", "exact", "fp8_block_pow2")
    with pytest.raises(_StartedError), serving.serve(served, tmp_path / "log", print, port=4000):
        pass
    assert asked == [(ServedModel(served.path, served.numerics, served.rollout), (9, 0)), "engine"]
