"""A model behind an engine of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fp8rl import serving
from fp8rl.cli import app
from fp8rl.diagnose.subject import read_served
from fp8rl.rl.guard.guard import GateState
from fp8rl.rl.run import kernels
from fp8rl.rl.run.kernels import ServedModel, Warmed
from fp8rl.trainer.checkpoint.files import About, write_about
from tests.support.paths import ROOT
from tests.support.scored_batches import CapsuleRun


class _StartedError(Exception):
    pass


def test_a_run_whose_gate_fell_back_to_bf16_is_served_in_bf16(tmp_path: Path) -> None:
    made = CapsuleRun.make(tmp_path)
    shutil.copytree(ROOT / "examples/models/tiny_qwen3_moe", made.files.model)
    for state, numerics in ((GateState(), made.numerics), (GateState(bf16=True), made.numerics.in_bf16())):
        shutil.rmtree(made.files.checkpoints, ignore_errors=True)
        made.files.checkpoint(4).mkdir(parents=True)
        write_about(made.files.checkpoint(4), About(4, {"standing": state.to_dict()}, {}))
        assert read_served(made.files.path, "exact", "fp8_block_pow2").numerics == numerics
    assert made.numerics != made.numerics.in_bf16()


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


def test_kernels_of_a_directory_are_compiled_beforehand_as_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def compiled(subject: Any, capability: tuple[int, int], say: Any) -> Warmed:
        asked.append((subject, capability))
        return Warmed("cache", 5, 4)

    monkeypatch.setattr(kernels, "warm", compiled)
    model = ROOT / "examples/models/tiny_qwen3_moe"
    done = CliRunner().invoke(app, ["warm", str(model), "--mode", "native", "--gpu", "h200"])
    assert done.exit_code == 0 and "5 kernels in cache, of which 4 were compiled now" in done.output
    assert asked == [(read_served(model, "native", "fp8_block_pow2").launched, (9, 0))]
    refused = CliRunner().invoke(app, ["warm", str(model), "run.steps=2"])
    assert refused.exit_code == 2 and "KEY=VALUE: found" in refused.output and len(asked) == 1
