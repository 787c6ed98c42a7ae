"""The record of a run: rows of metrics and files of rollouts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fp8rl.rl.record.metrics_log import read_metrics
from fp8rl.rl.record.rollouts import RolloutRecord, ScoredRecord, rollouts_found
from fp8rl.rl.record.run_dir import RunDir
from tests.support.paths import new_run
from tests.support.tracked import RECORDS, tracking


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path / "demo")


def test_a_run_without_trackers_has_its_own_files(run: RunDir) -> None:
    with tracking(run) as tracker:
        written = tracker.log(1, {"train/loss": 0.5}, lambda: (RECORDS, []))
    assert read_metrics(run.metrics) == [{"step": 1, **written}]
    assert rollouts_found(run.rollouts(1)) == (RECORDS, [])
    assert run.rollout_steps() == [1]
    assert {path.name for path in run.path.iterdir()} == {"metrics.jsonl", "rollouts"}


def test_trajectories_are_written_beside_the_next_step_and_a_failure_is_not_lost(run: RunDir) -> None:
    go_on = threading.Event()

    def slow() -> tuple[list[RolloutRecord], list[ScoredRecord]]:
        assert go_on.wait(30)
        return RECORDS, [ScoredRecord([1, 2, 3], [2], [-0.5], [-0.5], [4])]

    def failing() -> tuple[list[RolloutRecord], list[ScoredRecord]]:
        raise OSError("no room")

    with tracking(run) as tracker:
        tracker.log(1, {"train/loss": 0.5}, slow)
        tracker.write()
        assert not run.rollouts(1).exists() and run.metrics.read_text().count("\n") == 1
        go_on.set()
        tracker.wait()
        assert rollouts_found(run.rollouts(1)) == (RECORDS, []) and run.ahead(1).read_text().count("\n") == 1
        assert run.rollout_steps() == [1], "answers to later steps are no step's"
        tracker.log(2, {}, failing)
        with pytest.raises(OSError, match="no room"):
            tracker.log(3, {})
    assert run.metrics.read_text().count("\n") == 2
    with pytest.raises(OSError, match="no room"), tracking(run, resume_step=2) as tracker:
        tracker.log(3, {}, failing)
