"""The record of a run: rows, rollouts, events, sessions and its log."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import logging
import math
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest

from fp8rl.rl.record import history
from fp8rl.rl.record.console import StepConsole, run_log
from fp8rl.rl.record.metrics_log import read_metrics
from fp8rl.rl.record.rollouts import RolloutRecord, ScoredRecord, rollouts_found
from fp8rl.rl.record.run_dir import RunDir
from tests.support.paths import new_run
from tests.support.tracked import RECORDS, tracking


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path / "demo")


def test_a_run_without_trackers_has_its_own_files(run: RunDir) -> None:
    records = [*RECORDS[:-1], dataclasses.replace(RECORDS[-1], advantage=math.nan)]  # which is null in the file
    with tracking(run) as tracker:
        written = tracker.log(1, {"train/loss": 0.5}, lambda: (records, []))
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
    with pytest.raises(OSError, match="no room"), tracking(run, last=2) as tracker:
        tracker.log(3, {}, failing)


EVENTS = [
    history.Event(2, "mismatch/exact_frac", 0.5, "below 1.0", "resync", "capsules/step_2", "resync: ..."),
    history.Event(2, "train/loss", None, "not finite", "skip_step", None, "skip_step: ..."),
    history.Event(5, "gates/stale_resyncs", 1.0, "above 0", "resync", None, "é"),
]


def test_events_are_read_as_written_and_a_torn_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert history.read_events(path) == []
    for event in EVENTS:
        history.append_entry(path, event)
    with path.open("a") as file:
        file.write('{"step": 6, "met')
    assert history.read_events(path) == EVENTS


def test_a_resumed_run_forgets_events_of_steps_that_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    history.cut_events(path, 3)
    assert not path.exists()
    for event in EVENTS:
        history.append_entry(path, event)
    history.cut_events(path, 3)
    history.append_entry(path, dataclasses.replace(EVENTS[2], step=4))
    assert [event.step for event in history.read_events(path)] == [2, 2, 4]


def test_a_session_knows_machine_versions_and_code() -> None:
    session = history.this_session()
    assert abs(session.started - time.time()) < 60 and session.seconds is None
    assert session.versions["sglang"] == importlib.metadata.version("sglang")
    assert f"{psutil.virtual_memory().total / 2**30:.0f} GiB" in session.machine and "cores of" in session.machine


def test_the_last_line_of_a_session_counts_and_a_killed_one_has_no_end(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    killed = history.this_session()
    whole = dataclasses.replace(killed, started=killed.started + 10)
    ended = dataclasses.replace(whole, ended=whole.started + 2.5, why="a gate")
    for session in (killed, whole, ended):
        history.append_entry(path, session)
    with path.open("a") as file:
        file.write('{"started": "yesterday"}\n')
    found, bad = history.sessions_found(path)
    assert found == [killed, ended] and found[1].seconds == 2.5
    assert [line.number for line in bad] == [4]
    assert all("started" in json.loads(line) for line in path.read_text().splitlines())


def test_what_no_session_can_have_been_is_a_bad_line(tmp_path: Path) -> None:
    sound = dataclasses.asdict(history.this_session())
    wrong = ({"started": 1e300}, {"started": "now"}, {"ended": -1.0}, {"machine": 3}, {"versions": 1}, {"why": 2})
    lines = [json.dumps(sound | change) for change in wrong] + [json.dumps(sound)]
    (tmp_path / "sessions.jsonl").write_text("\n".join(lines) + "\n")
    found, bad = history.sessions_found(tmp_path / "sessions.jsonl")
    assert len(found) == 1 and [line.number for line in bad] == [1, 2, 3, 4, 5, 6]


def test_it_has_the_console_s_lines_warnings_and_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.txt"
    with pytest.raises(RuntimeError), run_log(path), StepConsole(2) as console:
        console.note("engine [up]")
        logging.getLogger("some.library").info("chatter")
        logging.getLogger("some.library").warning("low on disk")
        warnings.warn("old name", stacklevel=1)
        raise RuntimeError("out of luck")
    text = path.read_text()
    for part in ("fp8rl.console: engine [up]", "WARNING some.library: low on disk", "old name", "the run failed"):
        assert part in text
    assert text.rstrip().endswith("RuntimeError: out of luck")
    assert "chatter" not in text
    assert capsys.readouterr().out == "engine [up]\n"


def test_a_full_disk_does_not_hide_the_error_that_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="out of luck"), run_log(Path("/dev/full")):
        raise RuntimeError("out of luck")


def test_it_is_appended_to_and_let_go(tmp_path: Path) -> None:
    path, handlers = tmp_path / "log.txt", list(logging.getLogger().handlers)
    for line in ("first run", "resumed run"):
        with run_log(path), StepConsole(1) as console:
            console.note(line)
    with pytest.raises(KeyboardInterrupt), run_log(path):
        raise KeyboardInterrupt
    logging.getLogger("late").warning("after the end")
    lines = path.read_text().splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == ["first run", "resumed run", "interrupted"]
    assert logging.getLogger().handlers == handlers
