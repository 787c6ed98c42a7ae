"""A run in wandb: what its own command reads in the record, and what becomes of it when a server or a process dies."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import wandb

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.record.history import Event
from fp8rl.rl.record.metrics import METRICS
from fp8rl.rl.record.metrics_log import read_metrics
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.record.trackers import WandbSection, to_wandb
from fp8rl.rl.record.trackers.to_wandb import BASICS, METRIC_GROUPS, check_wandb
from tests.support.paths import new_run
from tests.support.servers import wait_until
from tests.support.tracked import RECORDS, tracking
from tests.support.wandb_server import WandbServer, wandb_server

pytestmark = pytest.mark.slow

MAX_ABS_D = "mismatch/train_rollout_logprob_abs_diff_max"
FIRED = Event(4, MAX_ABS_D, 0.25, "above 0", "warn", "capsules/step_4", "gate: d is 0.25")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    return new_run(tmp_path / "demo")


def wandb_records(run: RunDir) -> list[dict[str, Any]]:
    """The records of the run's newest wandb file, read by wandb's own command."""
    (path,) = sorted(run.path.glob("wandb/offline-run-*/run-*.wandb"))[-1:]
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return [json.loads(line) for line in printed.splitlines()]


def of_type(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record[kind] for record in records if record["type"] == kind]


def test_wandb_gets_rows_in_groups_rare_tables_and_alerts(run: RunDir) -> None:
    with tracking(run, "wandb", last_step=12) as tracker:
        tracker.log(1, {"train/loss": 0.5, "eval/accuracy": float("nan"), "rollout/reward/length/long": -0.25})
        for step in range(2, 13):
            row = {"train/loss": 1.0 / step, "rollout/reward_mean": 0.5, MAX_ABS_D: 0.25}
            tracker.log(step, row, lambda: (RECORDS, []))
        tracker.alert(FIRED.said)
        tracker.finish({"accuracy_after": 0.9})
    assert list(run.path.glob("wandb/data/artifacts/staging/*")), "tables are staged inside the run"

    records = wandb_records(run)
    (started,) = of_type(records, "run")
    assert (started["project"], started["display_name"]) == ("test", "demo")
    assert started["config"]["update"]["trainer"] == {"lr": 1e-4}
    metrics = of_type(records, "metric")
    axes = {m["glob_name"]: m["step_metric"] for m in metrics if "glob_name" in m}
    assert axes == {f"{group}/*": "step" for group in ("basics", *METRIC_GROUPS)}
    assert [m["name"] for m in metrics if m.get("options", {}).get("hidden")] == ["step"]
    largest = [m for m in metrics if m.get("name") == "basics/max_abs_d"]
    assert largest and all(m["summary"].get("max") for m in largest)
    rows = [record["item"] for record in of_type(records, "history")]
    assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 0.5), *((n, 1.0 / n) for n in range(2, 13))]
    assert [row["_step"] for row in rows] == list(range(1, 13))
    panels = {name.partition("/")[0] for row in rows for name in row if not name.startswith("_")}
    assert panels <= {"basics", *METRIC_GROUPS, "step"}, "nothing lands in wandb's unnamed group; the axis is hidden"
    assert "eval/accuracy" not in rows[0] and rows[0]["tracking/nonfinite_dropped"] == 1
    assert {"accuracy_after": 0.9} in [record["update"] for record in of_type(records, "summary")]
    assert [record["exit_code"] for record in of_type(records, "exit")] == [0]
    (alert,) = of_type(records, "alert")
    assert (alert["title"], alert["text"]) == ("demo: gate", "gate: d is 0.25 (capsules/step_4)")

    assert min("basics", *METRIC_GROUPS) == "basics" and set(BASICS.values()) <= METRICS.keys()
    assert {(row["basics/reward"], row["basics/max_abs_d"]) for row in rows[1:]} == {(0.5, 0.25)}
    assert not [name for row in read_metrics(run.metrics) for name in row if name.startswith("basics/")]

    assert [row["step"] for row in rows if "rollout/samples" in str(row)] == [10, 12]
    tables = list(run.path.glob("wandb/offline-run-*/files/media/table/rollout/*.json"))
    assert len(tables) == 2
    for table in map(json.loads, (file.read_text() for file in tables)):
        columns = ["prompt", "conversation", "reward", "parts of it", "outcome", "mean abs d", "d by token"]
        assert table["columns"] == columns
        assert table["data"] == [
            ["1+1=?", "2\n#### 2", 1.0, "integer 1, length/long -0.25", "", 0.0, "0 -0.0179"],
            ["1+2=?", "é", 1.0, "", "", None, "0 -0.0179"],
        ]


def test_no_environment_variable_is_new_in_the_trackers_thread(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """In C it would move the list of all variables, which the tokenizers of another thread may be reading."""
    before, put, new = {**os.environ}, os.putenv, []

    def putenv(name: bytes, value: bytes) -> None:
        if os.getenvb(name) is None and threading.current_thread() is not threading.main_thread():
            new.append(name)
        put(name, value)

    monkeypatch.setattr(os, "putenv", putenv)
    with tracking(run, "wandb") as tracker:
        tracker.log(1, {"train/loss": 0.5})
    assert not new and {**os.environ} == before


def test_a_folder_that_cannot_be_made_ends_the_tracker_and_not_the_run(run: RunDir) -> None:
    said: list[str] = []
    (run.path / "wandb").write_text("")
    with tracking(run, "wandb", lost=said.append) as tracker:
        tracker.log(1, {"train/loss": 0.5})
    assert [line.split(":")[0] for line in said] == ["wandb is lost"] and len(read_metrics(run.metrics)) == 1


@pytest.mark.parametrize(
    ("config", "key", "said"),
    [
        (WandbSection(project="a/b"), None, "tracking.wandb.project: found 'a/b'"),
        (WandbSection(mode="online"), None, "tracking.wandb.mode: found 'online with no key'"),
        (WandbSection(mode="online"), "short", "tracking.wandb.mode: found 'online with WANDB_API_KEY invalid"),
    ],
)
def test_what_wandb_would_refuse_is_refused(
    config: WandbSection, key: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb.teardown()  # it keeps what it once found in the environment
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    with pytest.raises(UserError) as error:
        check_wandb(config)
    assert str(error.value).startswith(said)


def test_a_resumed_run_continues_file_and_wandb_id_and_is_marked_where_it_fails(run: RunDir) -> None:
    with tracking(run, "wandb") as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"train/loss": float(step)})
        tracker.finish(exit_code=3)
    assert [record["exit_code"] for record in of_type(wandb_records(run), "exit")] == [3], "a gate has stopped it"
    first_id = (run.path / "wandb" / "run_id").read_text()
    with pytest.raises(RuntimeError, match="engine died"), tracking(run, "wandb", last=2) as tracker:
        tracker.log(3, {"train/loss": 30.0})
        raise RuntimeError("engine died")
    assert [row["train/loss"] for row in read_metrics(run.metrics)] == [1.0, 2.0, 30.0]
    records = wandb_records(run)
    (resumed,) = of_type(records, "run")
    assert resumed["run_id"] == first_id
    (row,) = [record["item"] for record in of_type(records, "history")]
    assert (row["step"], row["_step"]) == (3, 3), "not from 0 again"
    assert [record["exit_code"] for record in of_type(records, "exit")] == [1]


# Online: wandb's own process uploads the record.


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WandbServer]:
    """A server of ours that wandb takes for its own, and an account there."""
    wandb.teardown()  # it keeps what it once found in the environment
    with wandb_server() as server:
        account = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "k" * 40}
        for name, value in {**account, "HOME": str(tmp_path), "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1"}.items():
            monkeypatch.setenv(name, value)
        yield server
        wandb.teardown()


def uploaded(run: RunDir, server: WandbServer) -> list[int]:
    """The steps that the server has."""
    number = run.path / "wandb/run_id"
    rows = server.history.get(number.read_text(), []) if number.is_file() else []
    return [row["step"] for row in rows]


def test_a_server_that_stalls_costs_no_row(run: RunDir, online: WandbServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_wandb, "_UPLOAD_SECONDS", 2.0)
    said: list[str] = []
    steps = list(range(1, 22))
    with tracking(run, "wandb", wandb=WandbSection(mode="online", project="test"), lost=said.append) as tracker:
        for step in steps:
            if step == 4:
                assert wait_until(lambda: uploaded(run, online) == [1, 2, 3], 120), "while the run goes on"
                online.stalls.set()
            tracker.log(step, {"train/loss": 1.0 / step})
    (sentence,) = said
    (folder,) = run.path.glob("wandb/run-*")
    assert f"not all is uploaded after 2 s; `wandb sync --no-skip-online {folder}` uploads it" in sentence
    assert [row["step"] for row in read_metrics(run.metrics)] == steps
    online.go_on.set()
    online.stalls.clear()
    with wandb_server() as other:
        monkeypatch.setenv("WANDB_BASE_URL", other.url)
        command = [sys.executable, "-m", "wandb", "sync", "--no-skip-online", str(folder)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stderr
        assert "Finished syncing" in printed and uploaded(run, other) == steps


def test_a_server_that_refuses_the_key_costs_no_row(run: RunDir, online: WandbServer) -> None:
    online.refuses.set()
    said: list[str] = []
    with tracking(run, "wandb", wandb=WandbSection(mode="online", project="test"), lost=said.append) as tracker:
        tracker.log(1, {"train/loss": 0.5})
    (sentence,) = said
    assert sentence.startswith("wandb is lost: ") and "metrics.jsonl and the report are kept" in sentence
    assert [row["step"] for row in read_metrics(run.metrics)] == [1]


def test_record_and_upload_end_with_a_driver_that_is_killed(run: RunDir, online: WandbServer) -> None:
    code = f"""
from pathlib import Path
from fp8rl.rl.record.run_dir import RunDir
from tests.support.tracked import WandbSection, tracking
online = WandbSection(mode="online", project="test")
tracking(RunDir(Path({str(run.path)!r})), "wandb", wandb=online).log(1, {{"train/loss": 0.5}})
import time
time.sleep(600)
"""
    driver = subprocess.Popen([sys.executable, "-c", code])
    assert wait_until(lambda: uploaded(run, online) == [1], 120)
    parts = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait()
    assert parts and not psutil.wait_procs(parts, timeout=30)[1], "wandb's own process too"


# What a tracker does wrong costs the run nothing.


def core() -> psutil.Process:
    """wandb's own process."""
    (found,) = [
        each
        for each in psutil.Process().children()
        if each.status() != psutil.STATUS_ZOMBIE and "wandb-core" in " ".join(each.cmdline())
    ]
    return found


def test_training_goes_on_without_wandbs_process(run: RunDir) -> None:
    said: list[str] = []
    with tracking(run, "wandb", lost=said.append) as tracker:
        tracker.log(1, {"train/loss": 0.5})
        assert wait_until(lambda: list(run.path.glob("wandb/offline-run-*/run-*.wandb")) != [], 60)
        core().kill()
        steps = itertools.count(2)
        assert wait_until(lambda: bool(tracker.log(next(steps), {}, lambda: (RECORDS, []))) and bool(said), 60)
        last = next(steps)
        tracker.log(last, {})
    (sentence,) = said
    assert sentence.startswith("wandb is lost: ") and "metrics.jsonl" in sentence
    assert [row["step"] for row in read_metrics(run.metrics)] == [*range(1, last + 1)]
    with suppress(Exception):
        wandb.teardown()


def test_a_wandb_that_hangs_is_given_up_at_the_end(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8rl.rl.record.tracking._FINISH_SECONDS", 2.0)
    taken, log = threading.Event(), to_wandb.Wandb.log
    monkeypatch.setattr(to_wandb.Wandb, "log", lambda *row: (log(*row), taken.set()))
    said: list[str] = []
    with tracking(run, "wandb", lost=said.append) as tracker:
        tracker.log(1, {"train/loss": 0.5})
        assert taken.wait(60)
        (stopped := core()).suspend()
        for step in range(2, 30):
            tracker.log(step, {"train/loss": 1.0 / step})
    stopped.resume()
    assert said == ["wandb: not ended after 2 s, given up; metrics.jsonl has every row"]
    assert [row["step"] for row in read_metrics(run.metrics)] == [*range(1, 30)]


def test_a_tracker_that_is_too_slow_is_said_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, go_on, log = threading.Event(), threading.Event(), to_wandb.Wandb.log

    def slow(*row: Any) -> None:
        taken.set()
        assert go_on.wait(60)
        log(*row)

    monkeypatch.setattr(to_wandb.Wandb, "log", slow)
    monkeypatch.setattr("fp8rl.rl.record.tracking._RECORDS", 3)
    said: list[str] = []
    with tracking(run, "wandb", lost=said.append) as tracker:
        tracker.log(1, {"train/loss": 1.0})
        assert taken.wait(60)
        for step in range(2, 9):
            tracker.log(step, {"train/loss": 1.0 / step})
        go_on.set()
    assert said == ["trackers lack 4 records, as the queue was full; metrics.jsonl has every row"]
    assert [row["step"] for row in read_metrics(run.metrics)] == [*range(1, 9)]
    rows = [record["item"]["step"] for record in of_type(wandb_records(run), "history")]
    assert rows == [1, 2, 3, 4]
