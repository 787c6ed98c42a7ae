"""The folder of a run, seen from a notebook."""

import json
from pathlib import Path

import numpy
import pytest

from fp8rl import Run, UserError, train
from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.record.history import Event, Session, append_entry
from fp8rl.rl.record.rollouts import RolloutRecord, write_rollouts
from fp8rl.training import _as_overrides
from tests.support.paths import EXAMPLES, new_run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    run = new_run(tmp_path / "it")
    run.experiment.write_text(load_experiment(EXAMPLES / "arithmetic.yaml", ["run.steps=2"]).to_yaml())
    rows = [{"step": 0, "eval/accuracy": 0.25}, {"step": 1, "train/loss": 0.5}, {"step": 2, "train/loss": 0.25}]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.rollouts(1).parent.mkdir()
    write_rollouts(run.rollouts(1), [RECORD])
    append_entry(run.events, EVENT)
    append_entry(run.sessions, Session(1.0, "here", {}, None, 2.0, "stopped: train/loss"))
    run.checkpoint(2).mkdir(parents=True)
    return run.path


RECORD = RolloutRecord("1+1=?", "2", 1.0, 0.0, 0, 7, True, [1, 2], [3], [-0.5], [-0.5], [0], 1.0)
EVENT = Event(2, "train/loss", 0.25, "above 0.1", "warn", None, "train/loss is 0.25")


@pytest.mark.slow
def test_a_run_is_read_as_its_files_say(path: Path) -> None:
    run = Run(path)
    assert run.name == "it" and run.spec.run.steps == 2 and [row["step"] for row in run.metrics] == [0, 1, 2]
    assert run.metric("train/loss") == {1: 0.5, 2: 0.25} and run.frame()["train/loss"].loc[2] == 0.25
    assert run.steps == [1] and run.trajectories(1) == [RECORD]
    assert run.events == [EVENT] and run.stopped == "stopped: train/loss"
    assert run.checkpoints == {2: path / "checkpoints/step_2"} and run.capsules == {} and run.model is None
    assert run.verdict[0].startswith("Held-out accuracy is 0.250 at step 0")
    assert run.report() == path / "report.html" and run.report().is_file()


def test_a_bad_line_is_left_out_with_a_warning_and_another_folder_or_step_refused(path: Path, tmp_path: Path) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": "4"}\n')
    with pytest.warns(UserWarning, match=r"metrics.jsonl: 1 line.*: 4"):
        assert len(Run(path).metrics) == 3
    with pytest.raises(UserError, match=r"which has a spec.yaml"):
        Run(tmp_path)
    with pytest.raises(UserError, match=r"step: found 9, expected one whose trajectories are kept: \[1\]"):
        Run(path).trajectories(9)


def test_a_metric_that_no_run_has_is_answered_with_the_nearest(path: Path) -> None:
    run = Run(path)
    assert run.metric("sync/seconds") == {} and run.metric("mismatch/abs_diff_mean_pos_0") == {}
    for name, nearest in (("train/los", "train/loss"), ("eval/acuracy", "eval/accuracy"), ("loss", None)):
        with pytest.raises(UserError, match=rf"Run.metric: found '{name}'.*{nearest or 'metrics.md'}"):
            run.metric(name)
    with pytest.raises(UserError, match="rollout/reward/integr"):
        run.metric("rollout/reward/integr")
    (path / "metrics.jsonl").write_text("")
    assert run.metric("rollout/reward/integer") == {} and run.frame().empty and run.frame().index.name == "step"
    with pytest.raises(UserError, match="found no row"):
        run.report()


def test_a_spec_may_be_a_mapping_with_paths_from_here_or_an_experiment(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("model: {path: m}\nrun: {seed: 3}\n")
    values = {
        "defaults": "base.yaml", "data": {"train": Path("a.jsonl"), "system_prompt": "ü 😀\u2028"},
        "trainer": {"lr": numpy.float64(1e-5), "tp": numpy.int64(2)},
        "gates": ({"metric": "sync/seconds", "above": 1.0},),
    }  # fmt: skip
    loaded = load_experiment(values, ["run.steps=2"])
    assert (loaded.model.path, loaded.data.training[0].path) == (str(tmp_path / "m"), str(tmp_path / "a.jsonl"))
    assert (loaded.run.seed, loaded.run.steps, loaded.trainer.lr, loaded.trainer.tp) == (3, 2, 1e-5, 2)
    assert loaded.data.system_prompt == "ü 😀\u2028" and loaded.run.dir == str(tmp_path / "runs")
    assert load_experiment(loaded) == loaded
    with pytest.raises(UserError, match=r"run.stepz: found an unknown key.*run.steps"):
        load_experiment({**values, "run": {"stepz": 2}})
    with pytest.raises(UserError, match=r"found '?<built-in function len>.*Name a function.*file.py:name"):
        load_experiment({**values, "rewards": [{"function": len}]})
    with pytest.raises(UserError, match="^model.path: found nothing"):
        train({"data": {"train": "a.jsonl"}})


def test_overrides_of_a_notebook_are_those_of_the_command_line() -> None:
    given = {"run": {"steps": 2, "name": "a 😀"}, "trainer": {"lr": 1e-5}, "gates": [], "teacher": None}
    said = list(_as_overrides(given))
    assert said == ["run.steps=2", 'run.name="a 😀"', "trainer.lr=1e-05", "gates=[]", "teacher=null"]
    loaded = load_experiment(EXAMPLES / "arithmetic.yaml", [text for text in said if "name" not in text])
    assert (loaded.run.steps, loaded.trainer.lr, loaded.gates) == (2, 1e-5, ())
