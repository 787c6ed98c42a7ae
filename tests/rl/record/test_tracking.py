import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import wandb

import fp8rl.rl.record.wandb_run as wandb_run
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.record.metrics import METRICS
from fp8rl.rl.record.metrics_log import read_metrics
from fp8rl.rl.record.rollouts import RolloutRecord, ScoredRecord, rollouts_found
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.record.tracking import WANDB_LOST, RunTracker
from fp8rl.rl.record.wandb_run import BASICS, METRIC_GROUPS, Upload, WandbRun, WandbSection, check_wandb
from tests.support.paths import new_run
from tests.support.servers import wait_until
from tests.support.wandb_server import WandbServer, wandb_server

pytestmark = pytest.mark.slow

SPEC = {"run": {"name": "demo", "steps": 2}, "trainer": {"lr": 1e-4}}


def record(group: int, text: str, abs_diff_mean: float | None, **changes: Any) -> RolloutRecord:
    values = {
        "prompt": f"1+{group}=?",
        "text": text,
        "reward": 1.0,
        "abs_diff_mean": abs_diff_mean,
        "group": group,
        "seed": 1,
        "finished": True,
        "prompt_ids": [1, 2],
        "token_ids": [3, 4],
        "rollout_logprobs": [-0.1, -1.7320507764816284],
        "train_logprobs": [-0.1, -1.75],
        "weight_versions": [4, 4],
        "advantage": -0.5,
    }
    return RolloutRecord(**{**values, **changes})


PARTS = {"integer": 1.0, "length/long": -0.25}
RECORDS = [
    record(1, "2\n#### 2", 0.0, reward_parts=PARTS),
    record(1, "not shown", 0.0),
    record(2, "é", None, advantage=None),
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    return new_run(tmp_path / "demo")


def tracking(
    run: RunDir,
    config: WandbSection,
    *,
    spec: dict[str, Any] = SPEC,
    lost: Callable[[str], object] = pytest.fail,
    resume_step: int | None = None,
) -> RunTracker:
    recording = WandbRun(run, spec, config, resumed=resume_step is not None, lost=lost)
    return RunTracker(run, recording, last_step=spec["run"]["steps"], resume_step=resume_step)


def wandb_records(run: RunDir) -> list[dict[str, Any]]:
    """The records of the run's newest wandb file, read by wandb's own command."""
    (path,) = sorted(run.path.glob("wandb/offline-run-*/run-*.wandb"))[-1:]
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return [json.loads(line) for line in printed.splitlines()]


def of_type(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record[kind] for record in records if record["type"] == kind]


def test_wandb_gets_the_same_rows_in_groups_with_rare_tables_and_says_nothing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import openai  # noqa: F401  (what wandb looks for, to advertise Weave)

    monkeypatch.delenv("WANDB_DISABLE_WEAVE", raising=False)
    temporary = run.path.parent / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    wandb.termlog("this can be seen")
    abs_diff_max, spec = "mismatch/train_rollout_logprob_abs_diff_max", SPEC | {"run": {"steps": 12}}
    with tracking(run, WandbSection(mode="offline", project="test"), spec=spec) as tracker:
        assert os.environ["WANDB_DATA_DIR"].startswith(str(run.path))
        tracker.log(1, {"train/loss": 0.5, "eval/accuracy": float("nan"), "rollout/reward/length/long": -0.25})
        for step in range(2, 13):
            row = {"train/loss": 1.0 / step, "rollout/reward_mean": 0.5, abs_diff_max: 0.25}
            tracker.log(step, row, lambda: (RECORDS, []))
        tracker.finish({"accuracy_after": 0.9})
        assert not list(temporary.rglob("*.table.json")), "a long run would fill the disk"
    assert not os.environ.keys() & {"WANDB_DATA_DIR", "WANDB_DISABLE_WEAVE"}
    assert "weave" not in "".join(capfd.readouterr()).lower()

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
    history = [record["item"] for record in of_type(records, "history")]
    assert [(row["step"], row["train/loss"]) for row in history] == [(1, 0.5), *((n, 1.0 / n) for n in range(2, 13))]
    panels = {name.partition("/")[0] for row in history for name in row if not name.startswith("_")}
    assert panels <= {"basics", *METRIC_GROUPS, "step"}, "nothing lands in wandb's unnamed group; the axis is hidden"
    assert "eval/accuracy" not in history[0] and history[0]["tracking/nonfinite_dropped"] == 1
    assert {"accuracy_after": 0.9} in [record["update"] for record in of_type(records, "summary")]
    assert [record["exit_code"] for record in of_type(records, "exit")] == [0]

    assert min("basics", *METRIC_GROUPS) == "basics" and set(BASICS.values()) <= METRICS.keys()
    assert {(row["basics/reward"], row["basics/max_abs_d"]) for row in history[1:]} == {(0.5, 0.25)}
    assert not [name for row in read_metrics(run.metrics) for name in row if name.startswith("basics/")]

    assert run.rollout_steps() == list(range(2, 13))
    assert [row["step"] for row in history if "rollout/samples" in str(row)] == [10, 12]
    tables = list(run.path.glob("wandb/offline-run-*/files/media/table/rollout/*.json"))
    assert len(tables) == 2
    for table in map(json.loads, (file.read_text() for file in tables)):
        columns = ["prompt", "conversation", "reward", "parts of it", "outcome", "mean abs d", "d by token"]
        assert table["columns"] == columns
        assert table["data"] == [
            ["1+1=?", "2\n#### 2", 1.0, "integer 1, length/long -0.25", "", 0.0, "0 -0.0179"],
            ["1+2=?", "é", 1.0, "", "", None, "0 -0.0179"],
        ]


def test_disabled_wandb_leaves_the_files_of_the_run(run: RunDir) -> None:
    with tracking(run, WandbSection(mode="disabled")) as tracker:
        written = tracker.log(1, {"train/loss": 0.5}, lambda: (RECORDS, []))
    assert read_metrics(run.metrics) == [{"step": 1, **written}]
    assert rollouts_found(run.rollouts(1)) == (RECORDS, [])
    assert run.rollout_steps() == [1]
    assert not list(run.path.glob("wandb/*run-*"))


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
    with tracking(run, WandbSection(mode="disabled")) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"train/loss": float(step)})
    first_id = (run.path / "wandb" / "run_id").read_text()
    with (
        pytest.raises(RuntimeError, match="engine died"),
        tracking(run, WandbSection(), resume_step=2) as tracker,
    ):
        tracker.log(3, {"train/loss": 30.0})
        raise RuntimeError("engine died")
    assert [row["train/loss"] for row in read_metrics(run.metrics)] == [1.0, 2.0, 30.0]
    records = wandb_records(run)
    (resumed,) = of_type(records, "run")
    assert resumed["run_id"] == first_id
    assert [record["exit_code"] for record in of_type(records, "exit")] == [1]


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WandbServer]:
    """A server of ours that wandb takes for its own, and an account there."""
    wandb.teardown()  # it keeps what it once found in the environment
    with wandb_server() as server:
        account = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "k" * 40}
        for name, value in {**account, "HOME": str(tmp_path), "WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "0.5"}.items():
            monkeypatch.setenv(name, value)
        yield server
    wandb.teardown()


ONLINE = WandbSection(mode="online", project="test")


def uploaded(run: RunDir, server: WandbServer) -> list[int]:
    """The steps that the server has."""
    return [row["step"] for row in server.history.get((run.path / "wandb/run_id").read_text(), [])]


def sent_by_hand(run: RunDir) -> str:
    """What `wandb sync` says of the run's newest file."""
    (folder,) = sorted(run.path.glob("wandb/offline-run-*"))[-1:]
    command = [sys.executable, "-m", "wandb", "sync", str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stderr


def test_trajectories_are_written_beside_the_next_step_and_a_failure_is_not_lost(run: RunDir) -> None:
    go_on = threading.Event()

    def slow() -> tuple[list[RolloutRecord], list[ScoredRecord]]:
        assert go_on.wait(30)
        return RECORDS, [ScoredRecord([1, 2, 3], [2], [-0.5], [-0.5], [4])]

    def failing() -> tuple[list[RolloutRecord], list[ScoredRecord]]:
        raise OSError("no room")

    with tracking(run, WandbSection(mode="disabled"), spec={"run": {"steps": 9}}) as tracker:
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
    with (
        pytest.raises(OSError, match="no room"),
        tracking(run, WandbSection(mode="disabled"), resume_step=2) as tracker,
    ):
        tracker.log(3, {}, failing)


def test_a_run_is_uploaded_and_a_resumed_one_behind_it(run: RunDir, online: WandbServer) -> None:
    with tracking(run, ONLINE) as tracker:
        tracker.log(1, {"train/loss": 0.5})
        tracker.log(2, {"train/loss": 0.25}, lambda: (RECORDS, []))
    assert uploaded(run, online) == [1, 2] and "CreateArtifact" in online.calls, "the table too"
    with tracking(run, ONLINE, resume_step=2) as tracker:
        tracker.log(3, {"train/loss": 0.125})
    assert uploaded(run, online) == [1, 2, 3], "rows of before stay"
    assert not children("wandb")


def test_a_server_that_stalls_and_dies_costs_no_step_and_no_row(
    run: RunDir, online: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_run, "_FINISH_SECONDS", 2.0)
    said: list[str] = []
    steps, seconds = list(range(1, 22)), []
    with tracking(run, ONLINE, spec={"run": {"steps": 21}}, lost=said.append) as tracker:
        for step in steps:
            if step == 4:
                assert wait_until(lambda: uploaded(run, online) == [1, 2, 3], 120), "while the run goes on"
                online.stalls.set()
            if step == 15:
                online.die()
            began = time.perf_counter()
            tracker.log(step, {"train/loss": 1.0 / step}, lambda: (RECORDS, []))
            seconds.append(time.perf_counter() - began)
    assert max(seconds[3:]) < 10.0, "wandb's own online mode waits for 31 s at a table, and gives up the run"
    check_lost(run, steps, said)
    records = wandb_records(run)
    assert [row["item"]["step"] for row in of_type(records, "history")] == steps
    assert [record["exit_code"] for record in of_type(records, "exit")] == [0]
    with wandb_server() as other:
        monkeypatch.setenv("WANDB_BASE_URL", other.url)
        assert "Finished syncing" in sent_by_hand(run)
        assert uploaded(run, other) == steps


def test_a_server_that_refuses_the_key_is_noticed_while_the_run_goes_on(run: RunDir, online: WandbServer) -> None:
    online.refuses.set()
    said: list[str] = []
    with tracking(run, ONLINE, lost=said.append) as tracker:
        tracker.log(1, {}, lambda: (RECORDS, []))
        steps = itertools.count(2)
        assert wait_until(lambda: tracker.log(next(steps), {}).get(WANDB_LOST) == 1.0, 120)
    check_lost(run, list(range(1, next(steps))), said)


def test_an_upload_ends_with_a_driver_that_is_killed(run: RunDir, online: WandbServer) -> None:
    with tracking(run, WandbSection()) as tracker:
        tracker.log(1, {"train/loss": 0.5})
        (folder,) = run.path.glob("wandb/offline-run-*")
        upload = f"from pathlib import Path as P; Upload(P({str(folder)!r}), P({str(run.path / 'upload.log')!r}))"
        code = f"from fp8rl.rl.record.wandb_run import Upload; {upload}; import time; time.sleep(600)"
        driver = subprocess.Popen([sys.executable, "-c", code])
        assert wait_until(lambda: online.calls != [], 120)
        processes = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
        driver.wait()
        assert len(processes) == 2 and not psutil.wait_procs(processes, timeout=20)[1], "wandb's own process too"


def test_an_upload_that_is_stopped_is_ended(tmp_path: Path) -> None:
    upload = Upload(tmp_path, tmp_path / "log")
    os.kill(upload._process.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert not upload.finish(0.2) and upload.ended and time.monotonic() - began < 10


def check_lost(run: RunDir, steps: list[int], said: list[str]) -> None:
    """The loss was said once, the run's own file has every step, and no process is left."""
    (sentence,) = said
    assert sentence.startswith("the upload to wandb has ended (") and f"`wandb sync {run.path}" in sentence
    assert [row["step"] for row in read_metrics(run.metrics)] == steps
    assert not children("wandb")


def children(named: str) -> list[psutil.Process]:
    """Of this process, directly or not, with this in their command lines."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if named in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_training_goes_on_without_wandbs_process(run: RunDir) -> None:
    """Killed twice: between rows, and before the end. A run loses the rest in wandb, and nothing of its own files."""
    for resume_step in (None, 1):
        said: list[str] = []
        with tracking(run, WandbSection(), lost=said.append, resume_step=resume_step) as tracker:
            first = (resume_step or 0) + 1
            tracker.log(first, {"train/loss": 0.5})
            for process in psutil.Process().children(recursive=True):
                if process.name().startswith("wandb"):
                    process.kill()
                    process.wait()
            if resume_step is None:
                tracker.log(2, {"train/loss": 0.25}, lambda: (RECORDS, []))
                tracker.alert("gate: fired")
                last = tracker.log(3, {"train/loss": 0.125}, lambda: (RECORDS, []))
                assert last[WANDB_LOST] == 1.0
            tracker.finish({"accuracy_after": 0.9})
        (sentence,) = said
        assert sentence.startswith("wandb is lost (") and "metrics.jsonl" in sentence
        expected = [1, 2, 3] if resume_step is None else [1, 2]
        assert [row["step"] for row in read_metrics(run.metrics)] == expected
    assert "WANDB_DATA_DIR" not in os.environ
