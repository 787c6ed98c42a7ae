"""Trackers: their own files read back by their own packages, and what becomes of one that fails."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.record.trackers import TRACKERS, check_trackers, processes
from tests.support.paths import new_run
from tests.support.tracked import tracking, unexpected

ROWS = {1: {"train/loss": 0.5, "eval/set/pass@2": 0.25}, 2: {"train/loss": 0.25}}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def followed(
    folder: Path,
    name: str,
    rows: dict[int, dict[str, float]],
    lost: Callable[[str, str], object] = unexpected,
    resume_step: int | None = None,
) -> None:
    """Have a tracker follow a run of these rows to its end."""
    run = new_run(folder)
    with tracking(run, name, lost=lost, resume_step=resume_step, project="project") as tracker:
        for step, row in rows.items():
            tracker.log(step, row)


@needs("tensorboard")
def test_tensorboards_event_file_has_every_row_with_unit_and_meaning(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    followed(tmp_path, "tensorboard", ROWS)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    loss = [(event.step, event.tensor_proto.float_val[0]) for event in read.Tensors("train/loss")]
    assert loss == [(1, 0.5), (2, 0.25)]
    assert read.SummaryMetadata("train/loss").summary_description


@needs("mlflow")
def test_mlflow_has_rows_parameters_and_units_and_goes_on_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    followed(tmp_path, "mlflow", ROWS)
    followed(tmp_path, "mlflow", {3: {"train/loss": 0.125}}, resume_step=2)
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow/mlflow.db'}")
    experiment = client.get_experiment_by_name("project")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    history = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "train/loss")]
    assert history == [(1, 0.5), (2, 0.25), (3, 0.125)]
    assert run.data.metrics["eval/set/pass_at_2"] == 0.25
    assert (run.info.status, run.info.run_name, run.data.params["trainer.lr"]) == ("FINISHED", "demo", "0.0001")
    (units,) = tmp_path.glob("mlflow/files/**/metrics.json")
    assert json.loads(units.read_text())["train/loss"]["meaning"]


@needs("trackio")
def test_a_local_trackio_has_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    followed(tmp_path, "trackio", ROWS)
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("project", "demo")
    assert [(row["step"], row["train/loss"]) for row in logs] == [(1, 0.5), (2, 0.25)]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=rf"tracking.to: found '{name}'.*pip install 'fp8rl\[{name}\]'"):
        check_trackers([name])


KEEPS = """
from pathlib import Path
class Run:
    def log(self, metrics, step):
        if step in {fails}:
            raise RuntimeError("no server")
        with Path({told!r}).open("a") as file:
            print(step, metrics["train/loss"], file=file)
    def finish(self): ...
def init(**settings):
    return Run()
"""


@pytest.mark.slow
def test_rows_that_a_tracker_missed_are_told_when_the_run_goes_on_and_repeated_ones_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package that it needs is a file of ours."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    told = tmp_path / "told.txt"

    def start(rows: dict[int, float], resume_step: int | None, fails: tuple[int, ...] = ()) -> list[str]:
        (tmp_path / "trackio.py").write_text(KEEPS.format(fails=fails, told=str(told)))
        told.write_text("")
        values = {step: {"train/loss": loss} for step, loss in rows.items()}
        followed(tmp_path, "trackio", values, lost=lambda *_: None, resume_step=resume_step)
        return told.read_text().splitlines()

    assert start({1: 0.5, 2: 0.25, 3: 0.125}, None, fails=(2,)) == ["1 0.5"]
    assert start({4: 4.0, 5: 5.0}, resume_step=3) == ["2 0.25", "3 0.125", "4 4.0", "5 5.0"]
    assert start({5: 5.5}, resume_step=4, fails=(5,)) == [], "a step is repeated, and the tracker dies in it"
    assert start({6: 6.0}, resume_step=5) == ["5 5.5", "6 6.0"]


FAILS = "raise RuntimeError('no server')"
LOGS = "import time\nclass Run:\n    def log(self, *a, **b):\n        {}\ndef init(**settings):\n    return Run()\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package", "why"),
    [
        *((name, FAILS, "RuntimeError: no server") for name in TRACKERS),
        ("trackio", LOGS.format(FAILS), "RuntimeError: no server"),
        ("trackio", LOGS.format("time.sleep(600)"), "did not take the last rows"),
    ],
    ids=[*(f"{name} does not begin" for name in TRACKERS), "dies", "hangs"],
)
def test_a_tracker_that_dies_or_hangs_costs_no_row_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, why: str
) -> None:
    """The package that this one needs is a file of ours."""
    (tmp_path / f"{TRACKERS[name]}.py").write_text(package)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(processes, "_OTHERS_FINISH_SECONDS", 3.0 if "sleep" in package else 120.0)
    said: list[tuple[str, str]] = []
    followed(tmp_path, name, ROWS, lost=lambda *told: said.append(told))
    ((lost, sentence),) = said
    assert lost == name and sentence.startswith(f"{name} is lost: ") and why in sentence
    assert "metrics.jsonl and the report are kept" in sentence
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2
