"""A model behind an engine of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from fp8rl.diagnose.subject import read_served
from fp8rl.rl.guard.guard import GateState
from fp8rl.trainer.checkpoint.files import About, write_about
from tests.support.paths import ROOT
from tests.support.scored_batches import CapsuleRun


def test_a_run_whose_gate_fell_back_to_bf16_is_served_in_bf16(tmp_path: Path) -> None:
    made = CapsuleRun.make(tmp_path)
    shutil.copytree(ROOT / "examples/models/tiny_qwen3_moe", made.files.model)
    for state, numerics in ((GateState(), made.numerics), (GateState(bf16=True), made.numerics.in_bf16())):
        shutil.rmtree(made.files.checkpoints, ignore_errors=True)
        made.files.checkpoint(4).mkdir(parents=True)
        write_about(made.files.checkpoint(4), About(4, {"standing": state.to_dict()}, {}))
        assert read_served(made.files.path, "exact", "fp8_block_pow2").numerics == numerics
    assert made.numerics != made.numerics.in_bf16()
