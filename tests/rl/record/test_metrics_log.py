import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8rl.rl.record import metrics_log
from fp8rl.rl.record.metrics_log import MetricsLog, StepClock, read_metrics


def write_log(path: Path, steps: range) -> None:
    log = MetricsLog(path, last=-1)
    for step in steps:
        log.append(step, {"train/loss": step / 2})
    log.close()


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]


def test_a_row_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, last=-1)
    log.append(1, {"train/loss": 0.5, "rollout/tokens": 7})
    expected = {"step": 1, "train/loss": 0.5, "rollout/tokens": 7, "tracking/nonfinite_dropped": 0}
    assert path.read_bytes().endswith(b"\n")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [expected]
    log.append(2, {})
    assert steps_of(path) == [1, 2]


def test_nonfinite_values_are_dropped_and_counted_and_scalars_of_other_libraries_become_numbers(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", last=-1)
    row = {"a/nan": math.nan, "a/inf": math.inf, "a/minus": np.float64("-inf"), "a/good": 2.5}
    written = log.append(1, row | {"a/np": np.float32(0.5), "a/torch": torch.tensor(0.25)})
    assert written == {"a/good": 2.5, "a/np": 0.5, "a/torch": 0.25, "tracking/nonfinite_dropped": 3}
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, **written}]


def test_resume_cuts_the_rows_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_log(path, range(1, 8))
    log = MetricsLog(path, last=4)
    assert steps_of(path) == [1, 2, 3, 4]
    log.append(5, {"train/loss": 99.0})
    assert [row["train/loss"] for row in read_metrics(path)] == [0.5, 1.0, 1.5, 2.0, 99.0]


def test_a_torn_last_line_is_ignored_and_removed_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_log(path, range(1, 4))
    with path.open("ab") as file:
        file.write(b'{"step": 4, "train/lo')
    assert steps_of(path) == [1, 2, 3]
    MetricsLog(path, last=3).append(4, {})
    assert steps_of(path) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "line", ["{broken", "[1]", '{"loss": 1}', '{"step": 2, "loss": ' + "9" * 400 + "}", '{"step": ' + "9" * 5000 + "}"]
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that shows the first element."""
    now = [100.0]
    monkeypatch.setattr(metrics_log.time, "perf_counter", lambda: now[0])
    return now


def spend(stopwatch: StepClock, time: list[float], phase: str, seconds: float) -> None:
    with stopwatch.phase(phase):
        time[0] += seconds


def test_the_time_between_two_laps_belongs_to_the_next_step(time: list[float]) -> None:
    stopwatch = StepClock()
    spend(stopwatch, time, "train", 1.0)
    stopwatch.lap()
    time[0] += 0.5
    spend(stopwatch, time, "train", 1.0)
    assert stopwatch.lap() == {"perf/train_seconds": 1.0, "perf/step_seconds": 1.5, "perf/overhead_seconds": 0.5}


def test_a_phase_within_another_is_counted_once_and_the_rest_is_overhead(time: list[float]) -> None:
    stopwatch = StepClock()
    with pytest.raises(RuntimeError), stopwatch.phase("rollout"):
        time[0] += 2.0
        raise RuntimeError
    time[0] += 0.125
    with stopwatch.phase("monitor"):
        time[0] += 0.5
        spend(stopwatch, time, "train", 2.0)
        time[0] += 0.25
    spend(stopwatch, time, "rollout", 1.0)
    phases = {"perf/rollout_seconds": 3.0, "perf/train_seconds": 2.0, "perf/monitor_seconds": 0.75}
    assert stopwatch.lap() == phases | {"perf/step_seconds": 5.875, "perf/overhead_seconds": 0.125}
