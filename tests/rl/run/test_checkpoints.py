import time
from pathlib import Path
from typing import Any

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment.contents import Content
from fp8rl.rl.guard.gates import RuleState
from fp8rl.rl.guard.guard import GateState
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.run.checkpoints import Checkpoints, begins_anew, changes, check_contents, check_resumable, with_older
from fp8rl.rollout.types import EngineError
from fp8rl.trainer.actor import TrainerDiedError
from fp8rl.trainer.checkpoint.files import About, DamagedCheckpointError, check_digests, write_about
from tests.support.checkpoints import NOTHING, Describing, save
from tests.support.experiments import experiment


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_a_checkpoint_counts_once_it_is_written_and_recorded_and_the_newest_stay(tmp_path: Path) -> None:
    run, settings = RunDir(tmp_path), experiment(checkpoint={"every": 2, "keep": 2})
    for step in (2, 4):
        save(run, settings, step)
    (run.checkpoints / "..step_5.pending.partial").mkdir()
    with Checkpoints(run, settings) as checkpoints:
        trainer = Describing()
        checkpoints.begin(trainer, GateState(), 6, NOTHING)
        checkpoints.recorded()
        assert run.checkpoint_steps() == [2, 4], "it is not written yet"
        trainer.may_write.set()
        checkpoints.wait()
        assert names(run) == ["step_4", "step_6"]
        checkpoints.begin(trainer, GateState(), 8, NOTHING)
    assert run.checkpoint_steps() == [4, 6], "the step has no row"


def test_what_goes_wrong_while_a_checkpoint_is_written_is_raised_after_a_step(tmp_path: Path) -> None:
    run, settings = RunDir(tmp_path), experiment()
    trainer = Describing()
    trainer.failure = OSError("no room")
    with pytest.raises(OSError, match="no room"), Checkpoints(run, settings) as checkpoints:
        checkpoints.begin(trainer, GateState(), 2, NOTHING)
        trainer.may_write.set()
        for _ in range(1000):
            checkpoints.recorded()
            time.sleep(0.01)
    assert run.checkpoint_steps() == []


@pytest.mark.parametrize(
    ("error", "kept"), [(KeyboardInterrupt(), []), (TrainerDiedError("rank 1"), []), (EngineError("its port"), [2])]
)
def test_a_run_that_fails_keeps_what_is_being_written(tmp_path: Path, error: BaseException, kept: list[int]) -> None:
    run, settings, trainer = RunDir(tmp_path), experiment(), Describing()
    with pytest.raises(type(error)), Checkpoints(run, settings) as checkpoints:
        checkpoints.begin(trainer, GateState(), 2, NOTHING)
        checkpoints.recorded()
        if kept:
            trainer.may_write.set()
        raise error
    assert run.checkpoint_steps() == kept


def test_what_gates_have_changed_comes_back_with_the_checkpoint(tmp_path: Path) -> None:
    run, settings = RunDir(tmp_path), experiment()
    gate_state = GateState(tis_cap=1.5, router_replay=True, bf16=True, rules={"a": RuleState(beyond=3)})
    save(run, settings, 4, gate_state)
    back = GateState.of_checkpoint(run, 4)
    assert back == gate_state and GateState.of_checkpoint(run, None) == GateState()
    configured = settings.numerics_config()
    fallen = back.numerics(configured)
    assert (fallen.trainer, fallen.rollout, fallen.spec) == ("bf16", "bf16", configured.spec)
    assert GateState().numerics(configured) == configured


@pytest.mark.parametrize("rules", [{"a": 3}, {"a": {"beyond": -1}}, {"a": {"unheard": 1}}])
def test_a_forged_state_of_a_gate_is_refused(tmp_path: Path, rules: dict[str, Any]) -> None:
    """Whoever writes `about.json` can write its digest too."""
    run = RunDir(tmp_path)
    run.checkpoint(4).mkdir(parents=True)
    write_about(run.checkpoint(4), About(4, {"standing": {"rules": rules}}, {}))
    with pytest.raises(UserError, match=r"standing: rules\.a"):
        GateState.of_checkpoint(run, 4)


def test_damage_names_the_next_older_checkpoint_that_is_whole(tmp_path: Path) -> None:
    run, settings = RunDir(tmp_path), experiment(run={"steps": 9}, checkpoint={"every": 1, "keep": 9})
    for step in (2, 4, 6):
        save(run, settings, step)
    (run.checkpoint(6) / "state/common.pt").write_text("cut")
    with pytest.raises(UserError, match=r"common\.pt: found 3 bytes, .* the next older one, of step 4, is whole"):
        check_resumable(run, settings)
    (run.checkpoint(6) / "state/common.pt").write_text("of step 7")  # as long as it was: the trainer finds it
    check_resumable(run, settings)
    with pytest.raises(DamagedCheckpointError, match="step_6/state/common.pt: found SHA-256") as damage:
        check_digests(run.checkpoint(6))
    (run.checkpoint(4) / "about.json").write_text("{")
    assert "of step 2, is whole" in str(with_older(damage.value, run, 6))
    (run.checkpoint(2) / "state/common.pt").unlink()
    assert "No older checkpoint is whole: start over" in str(with_older(damage.value, run, 6))


def test_a_run_resumes_only_what_it_can(tmp_path: Path) -> None:
    run, settings = RunDir(tmp_path), experiment(run={"steps": 6})
    with pytest.raises(UserError, match="--resume: found 'no checkpoint.*--overwrite"):
        check_resumable(run, settings)
    save(run, experiment(checkpoint={"content": "weights"}), 4)
    save(run, settings, 6)
    assert begins_anew(run, 6) == "" and "weights alone (checkpoint.content): Adam and" in begins_anew(run, 4)
    check_resumable(run, settings)
    with pytest.raises(UserError, match=r"run\.steps: found 5, expected at least 6"):
        check_resumable(run, experiment(run={"steps": 5}))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("numerics.preset", "fp8_block_fp32", "numerics: found 'spec digest .*, by numerics.preset=fp8_block_fp"),
        ("numerics.first_layers_bf16", 1, "by numerics.first_layers_bf16=1 .was 0.*as in the checkpoint of step 6"),
        ("adapter.rank", 8, "adapter: found .*'rank': 8.*, expected None, as in the checkpoint of step 6"),
        ("numerics.kv", "fp8", "numerics.kv: found 'fp8, scales 1 and 1', expected None"),
        ("algorithm.name", "sft", "algorithm.name: found 'sft', expected 'grpo'"),
        ("run.seed", 3, "run.seed: found 3, expected 0"),
    ],
)
def test_a_run_keeps_what_makes_it_one_experiment(tmp_path: Path, key: str, value: Any, said: str) -> None:
    run = RunDir(tmp_path)
    save(run, experiment(), 6)
    run.experiment.write_text(experiment().to_yaml())
    section, name = key.split(".")
    with pytest.raises(UserError, match=said):
        check_resumable(run, experiment(**{section: {name: value}}))


def test_other_settings_may_change_and_are_said(tmp_path: Path) -> None:
    run, before = RunDir(tmp_path), experiment(trainer={"lr": 1e-4})
    run.experiment.write_text(before.to_yaml())
    assert changes(run, before) == []
    save(run, before, 2)
    after = experiment(run={"steps": 90}, trainer={"lr": 1e-3}, gates=[{"metric": "train/loss", "above": 1.0}])
    run.experiment.write_text(after.to_yaml())  # as by a user who edits the run's own
    said = changes(run, after)
    assert [text.split("=")[0] for text in said] == ["gates", "run.steps", "trainer.lr"]
    assert said[2] == "trainer.lr=0.001 (was 0.0001)"
    assert all("may differ" in changes(run, experiment(**{key: {"tp": 2}}))[-1] for key in ("trainer", "rollout"))


def test_other_contents_of_what_the_spec_names_are_refused_unless_they_are_accepted(tmp_path: Path) -> None:
    run, function = RunDir(tmp_path), "rewards.functions.0.function"
    before = {"data.train": Content("/t", "1"), function: Content("f", "1")}
    save(run, experiment(), 6, held=before)
    assert check_contents(run, before, accept=False) == []
    after = before | {"data.train": Content("/t", "2")}
    with pytest.raises(UserError, match=r"^data\.train: found other contents of /t .*step 6.*--accept-changed"):
        check_contents(run, after, accept=False)
    assert check_contents(run, after, accept=True) == ["resuming with other contents of data.train: /t"]
    both = after | {function: Content("f", "2")}
    with pytest.raises(UserError, match=r"data\.train: .*; rewards\.functions\.0\.function: found other contents of f"):
        check_contents(run, both, accept=False)
    renamed = before | {"data.train": Content("/other", "2"), "data.eval": Content("/e", "3")}
    assert check_contents(run, renamed, accept=False) == [], "another value of a key is said by `changes`"


def test_a_checkpoint_without_digests_resumes_with_a_note(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.checkpoint(4).mkdir(parents=True)
    write_about(run.checkpoint(4), About(4, {}, {}))
    (note,) = check_contents(run, {"data.train": Content("/t", "1")}, accept=False)
    assert "step 4 has no digests of data and functions" in note
    write_about(run.checkpoint(4), About(4, {"contents": {"data.train": 3}}, {}))
    with pytest.raises(UserError, match=r"contents: data\.train: found 3"):
        check_contents(run, {}, accept=False)
