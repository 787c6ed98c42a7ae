"""A run folder of 25 November 2026, before everything was imported below `fp8rl`: it opens, and its checkpoint loads.

`old_run/` is what four prompts of the demo left in two steps with adapters of rank 1, in /srv/experiments, without its
page and its logs.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fp8rl import Run
from fp8rl.rl.experiment import read_resolved
from fp8rl.rl.experiment.contents import contents
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.report.report import write_report
from fp8rl.rl.run.checkpoints import check_contents, check_resumable
from fp8rl.trainer.checkpoint.files import check_digests, read_about
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from fp8rl.trainer.distributed.layout import Layout
from tests.support.paths import EXAMPLES

KEPT = Path(__file__).with_name("old_run")


@pytest.fixture
def old(tmp_path: Path) -> RunDir:
    """A copy of it, whose spec names what was moved by where it is now."""
    run = RunDir(shutil.copytree(KEPT, tmp_path / "old"))
    text = run.experiment.read_text().replace("/srv/experiments/examples", str(EXAMPLES))
    run.experiment.write_text(text.replace("/srv/experiments/runs", str(tmp_path)))
    return run


def test_it_opens(old: RunDir) -> None:
    run = Run(old.path)
    assert list(run.metric("rollout/reward_mean")) == [1, 2] and len(run.frame()) == 3
    assert "d = 0 on all 472 tokens" in " ".join(run.verdict)
    assert [each.step for each in run.events] == [1] and len(run.trajectories(2)) == 16
    assert "bit for bit" in write_report(old.path)[0].read_text()


def test_it_can_be_resumed(old: RunDir) -> None:
    """Its data and its model have the contents that its checkpoint has written down."""
    experiment = read_resolved(old.experiment)
    check_resumable(old, experiment)
    held = contents(experiment)
    assert check_contents(old, held, accept=False) == []
    written = read_about(old.checkpoint(2)).extra["contents"]
    assert {key: each["digest"] for key, each in written.items()} == {key: each.digest for key, each in held.items()}


@pytest.mark.slow
def test_its_checkpoint_has_the_adapters_that_it_exported(old: RunDir, layout: Layout, tmp_path: Path) -> None:
    from fp8rl.trainer.trainer import Trainer

    experiment = read_resolved(old.experiment)
    assert experiment.adapter is not None
    check_digests(old.checkpoint(2))
    numerics = experiment.numerics_config()
    path = EXAMPLES / "models/tiny_qwen3_moe"
    trainer = Trainer(TrainerSpec(path, TrainerSection(), numerics, 0, 2, 64, adapter=experiment.adapter), layout)
    assert trainer.load(old.checkpoint(2))["step"] == 2
    trainer.export_adapter(tmp_path / "again")
    name = "adapter_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (old.adapter / name).read_bytes()
