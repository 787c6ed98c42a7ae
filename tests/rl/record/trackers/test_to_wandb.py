"""A run in wandb: what its own command reads in the record, and what becomes of it when a server or a process dies."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import wandb

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.record.events import Event, append_event
from fp8rl.rl.record.metrics import METRICS
from fp8rl.rl.record.metrics_log import read_metrics
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.record.trackers import processes
from fp8rl.rl.record.trackers.to_wandb import BASICS, METRIC_GROUPS, WandbSection, check_wandb
from fp8rl.rl.record.trackers.upload import Upload
from fp8rl.rl.record.tracking import WANDB_LOST
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


def test_wandb_gets_rows_in_groups_rare_tables_and_alerts(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = run.path.parent / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    append_event(run.events, Event(0, "x", None, "", "resume", None, "of an earlier start"))
    with tracking(run, "wandb", last_step=12) as tracker:
        tracker.log(1, {"train/loss": 0.5, "eval/accuracy": float("nan"), "rollout/reward/length/long": -0.25})
        for step in range(2, 13):
            row = {"train/loss": 1.0 / step, "rollout/reward_mean": 0.5, MAX_ABS_D: 0.25}
            tracker.log(step, row, lambda: (RECORDS, []))
        append_event(run.events, FIRED)
        tracker.finish({"accuracy_after": 0.9})
    assert [path.name for path in temporary.iterdir() if "symon" not in path.name] == []
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


@pytest.mark.parametrize(
    ("config", "key", "said"),
    [
        (WandbSection(project="a/b"), None, "tracking.wandb.project: found 'a/b'"),
        (WandbSection(project="x" * 200), None, "tracking.wandb.project: found 'xxx"),
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
    with (
        pytest.raises(RuntimeError, match="engine died"),
        tracking(run, "wandb", resume_step=2) as tracker,
    ):
        tracker.log(3, {"train/loss": 30.0})
        raise RuntimeError("engine died")
    assert [row["train/loss"] for row in read_metrics(run.metrics)] == [1.0, 2.0, 30.0]
    records = wandb_records(run)
    (resumed,) = of_type(records, "run")
    assert resumed["run_id"] == first_id
    (row,) = [record["item"] for record in of_type(records, "history")]
    assert (row["step"], row["_step"]) == (3, 3), "not from 0 again"
    assert [record["exit_code"] for record in of_type(records, "exit")] == [1]


# Online: a process beside the record uploads it.


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WandbServer]:
    """A server of ours that wandb takes for its own, and an account there."""
    with wandb_server() as server:
        account = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "k" * 40}
        for name, value in {**account, "HOME": str(tmp_path), "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "0.5"}.items():
            monkeypatch.setenv(name, value)
        yield server


def uploaded(run: RunDir, server: WandbServer) -> list[int]:
    """The steps that the server has."""
    number = run.path / "wandb/run_id"
    rows = server.history.get(number.read_text(), []) if number.is_file() else []
    return [row["step"] for row in rows]


def sent_by_hand(run: RunDir) -> str:
    """What `wandb sync` says of the run's newest file."""
    (folder,) = sorted(run.path.glob("wandb/offline-run-*"))[-1:]
    command = [sys.executable, "-m", "wandb", "sync", str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stderr


def test_a_run_is_uploaded_and_a_resumed_one_behind_it(run: RunDir, online: WandbServer) -> None:
    with tracking(run, "wandb", online=True, last_step=2) as tracker:
        tracker.log(1, {"train/loss": 0.5})
        tracker.log(2, {"train/loss": 0.25}, lambda: (RECORDS, []))
    assert uploaded(run, online) == [1, 2] and "CreateArtifact" in online.calls, "the table too"
    with tracking(run, "wandb", online=True, resume_step=2) as tracker:
        tracker.log(3, {"train/loss": 0.125})
    assert uploaded(run, online) == [1, 2, 3], "rows of before stay"
    assert not children("wandb")


def test_a_server_that_stalls_and_dies_costs_no_step_and_no_row(
    run: RunDir, online: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(processes._FINISH_SECONDS, "wandb", 10.0)
    said: list[str] = []
    steps, seconds = list(range(1, 22)), []
    with tracking(run, "wandb", online=True, lost=lambda name, text: said.append(text)) as tracker:
        for step in steps:
            if step == 4:
                assert wait_until(lambda: uploaded(run, online) == [1, 2, 3], 120), "while the run goes on"
                online.stalls.set()
            if step == 15:
                online.die()
            began = time.perf_counter()
            tracker.log(step, {"train/loss": 1.0 / step}, lambda: (RECORDS, []))
            seconds.append(time.perf_counter() - began)
    assert max(seconds) < 5.0, "wandb's own online mode waits for 31 s at a table, and gives up the run"
    check_upload_lost(run, steps, said)
    records = wandb_records(run)
    rows = [record["item"] for record in of_type(records, "history")]
    assert [row["step"] for row in rows] == steps
    assert [record["exit_code"] for record in of_type(records, "exit")] == [0]
    with wandb_server() as other:
        monkeypatch.setenv("WANDB_BASE_URL", other.url)
        assert "Finished syncing" in sent_by_hand(run)
        assert uploaded(run, other) == steps


def test_a_server_that_refuses_the_key_is_noticed_while_the_run_goes_on(run: RunDir, online: WandbServer) -> None:
    online.refuses.set()
    said: list[str] = []
    with tracking(run, "wandb", online=True, lost=lambda name, text: said.append(text)) as tracker:
        steps = itertools.count(1)
        assert wait_until(lambda: tracker.log(next(steps), {}).get(WANDB_LOST) == 1.0, 120)
    last = next(steps) - 1
    check_upload_lost(run, list(range(1, last + 1)), said)
    rows = [record["item"]["step"] for record in of_type(wandb_records(run), "history")]
    assert rows[-1] == last, "the record goes on"


def check_upload_lost(run: RunDir, steps: list[int], said: list[str]) -> None:
    """The loss was said once, the run's own file has every step, and no process is left."""
    (sentence,) = said
    assert sentence.startswith("the upload to wandb has ended (") and f"`wandb sync {run.path}" in sentence
    assert [row["step"] for row in read_metrics(run.metrics)] == steps
    assert not children("wandb")


def test_record_and_upload_end_with_a_driver_that_is_killed(run: RunDir, online: WandbServer) -> None:
    code = f"""
from pathlib import Path
from fp8rl.rl.record.run_dir import RunDir
from tests.support.tracked import tracking
tracking(RunDir(Path({str(run.path)!r})), "wandb", online=True).log(1, {{"train/loss": 0.5}})
import time
time.sleep(600)
"""
    driver = subprocess.Popen([sys.executable, "-c", code])
    assert wait_until(lambda: online.calls != [], 120)
    parts = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait()
    assert len(parts) >= 4 and not psutil.wait_procs(parts, timeout=30)[1], "wandb's own processes too"
    assert [record["exit_code"] for record in of_type(wandb_records(run), "exit")] == [1]
    assert uploaded(run, online) == [1], "what there is is sent on the way out"


def test_an_upload_that_is_stopped_is_ended(tmp_path: Path) -> None:
    upload = Upload(tmp_path, tmp_path / "log")
    os.kill(upload._process.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert not upload.finish(0.2) and upload.ended and time.monotonic() - began < 10


def children(named: str) -> list[psutil.Process]:
    """Of this process, directly or not, with this in their command lines."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if named in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.parametrize("killed", ["wandb-core", "trackers.follow"])
def test_training_goes_on_without_wandbs_processes(run: RunDir, killed: str) -> None:
    """Its own service, or the process that tells it of the run. The rest is lost in wandb, and nothing of the run."""
    said: list[tuple[str, str]] = []
    with tracking(run, "wandb", lost=lambda name, text: said.append((name, text))) as tracker:
        tracker.log(1, {"train/loss": 0.5})
        assert wait_until(lambda: children("wandb-core") != [], 60)
        for process in children(killed):
            process.kill()
        steps = itertools.count(2)
        assert wait_until(lambda: tracker.log(next(steps), {}, lambda: (RECORDS, [])).get(WANDB_LOST) == 1.0, 60)
        last = next(steps)
        assert tracker.log(last, {})[WANDB_LOST] == 1.0
    ((name, sentence),) = said
    assert name == "wandb" and sentence.startswith("wandb is lost: it has ended (") and "metrics.jsonl" in sentence
    assert [row["step"] for row in read_metrics(run.metrics)] == [*range(1, last + 1)]
