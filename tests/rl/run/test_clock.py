import pytest

from fp8rl.rl.record import metrics_log
from fp8rl.rl.record.metrics_log import StepClock


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that shows the first element."""
    now = [100.0]
    monkeypatch.setattr(metrics_log.time, "perf_counter", lambda: now[0])
    return now


def spend(stopwatch: StepClock, time: list[float], phase: str, seconds: float) -> None:
    with stopwatch.phase(phase):
        time[0] += seconds


def test_what_no_phase_accounts_for_is_overhead(time: list[float]) -> None:
    stopwatch = StepClock()
    spend(stopwatch, time, "rollout", 2.0)
    time[0] += 0.25
    spend(stopwatch, time, "train", 1.0)
    spend(stopwatch, time, "sync", 0.5)
    spend(stopwatch, time, "rollout", 1.0)
    assert stopwatch.lap() == {
        "perf/rollout_seconds": 3.0,
        "perf/train_seconds": 1.0,
        "perf/step_seconds": 4.75,
        "perf/overhead_seconds": 0.25,
    }


def test_the_time_between_two_laps_belongs_to_the_next_step(time: list[float]) -> None:
    stopwatch = StepClock()
    spend(stopwatch, time, "train", 1.0)
    stopwatch.lap()
    time[0] += 0.5
    spend(stopwatch, time, "train", 1.0)
    assert stopwatch.lap() == {
        "perf/train_seconds": 1.0,
        "perf/step_seconds": 1.5,
        "perf/overhead_seconds": 0.5,
    }
    time[0] += 7.0
    stopwatch.restart()
    assert stopwatch.lap() == {"perf/step_seconds": 0.0, "perf/overhead_seconds": 0.0}


def test_a_phase_that_fails_is_counted(time: list[float]) -> None:
    stopwatch = StepClock()
    with pytest.raises(RuntimeError), stopwatch.phase("train"):
        time[0] += 1.0
        raise RuntimeError
    assert stopwatch.lap()["perf/train_seconds"] == 1.0


def test_a_phase_within_another_is_counted_once(time: list[float]) -> None:
    stopwatch = StepClock()
    with stopwatch.phase("monitor"):
        time[0] += 0.5
        spend(stopwatch, time, "train", 2.0)
        time[0] += 0.25
    assert stopwatch.lap() == {
        "perf/train_seconds": 2.0,
        "perf/monitor_seconds": 0.75,
        "perf/step_seconds": 2.75,
        "perf/overhead_seconds": 0.0,
    }
