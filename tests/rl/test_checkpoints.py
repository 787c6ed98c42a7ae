import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from numerics.errors import UserError
from rl.checkpoints import changes, check_resumable, is_due, publish_checkpoint, write_checkpoint
from rl.guard.standing import Standing
from rl.run_dir import RunDir, write_spec
from rl.spec import ExperimentSpec, parse_spec


def spec_of(**sections: dict[str, Any]) -> ExperimentSpec:
    return parse_spec({"model": {"path": "m"}, "data": {"train": "t"}, **sections})


def stack_of(run: RunDir, spec: ExperimentSpec) -> Any:
    """A stack whose trainer writes the description of a checkpoint and nothing else."""

    def save(path: Path, extra: dict[str, Any]) -> None:
        path.mkdir(parents=True)
        (path / "about.json").write_text(json.dumps({"extra": extra}))

    return SimpleNamespace(run=run, spec=spec, standing=Standing(), trainer=SimpleNamespace(save=save))


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_checkpoints_are_due_at_intervals_and_at_the_end() -> None:
    spec = spec_of(run={"steps": 7}, checkpoint={"every": 3})
    assert [step for step in range(1, 8) if is_due(spec, step)] == [3, 6, 7]


def test_a_checkpoint_counts_once_published_and_the_newest_stay(tmp_path: Path) -> None:
    run, spec = RunDir(tmp_path), spec_of(checkpoint={"every": 2, "keep": 2})
    stack = stack_of(run, spec)
    for step in (2, 4):
        write_checkpoint(stack, step)
        publish_checkpoint(stack, step)
    (run.checkpoints / "..step_5.pending.partial").mkdir()
    write_checkpoint(stack, 6)
    assert run.checkpoint_steps() == [2, 4], "the step has no row yet"
    publish_checkpoint(stack, 6)
    assert names(run) == ["step_4", "step_6"]


def test_what_gates_have_changed_comes_back_with_the_checkpoint(tmp_path: Path) -> None:
    run, spec = RunDir(tmp_path), spec_of()
    stack = stack_of(run, spec)
    stack.standing = Standing(tis_cap=1.5, router_replay=True, bf16=True, stale_resyncs=2, rules={"a": {"beyond": 3}})
    write_checkpoint(stack, 4)
    publish_checkpoint(stack, 4)
    back = Standing.of_checkpoint(run, 4)
    assert back == stack.standing and Standing.of_checkpoint(run, None) == Standing()
    configured = spec.numerics_config()
    fallen = back.numerics(configured)
    assert (fallen.trainer, fallen.rollout, fallen.spec) == ("bf16", "bf16", configured.spec)
    assert Standing().numerics(configured) == configured


def test_a_run_resumes_only_what_it_can(tmp_path: Path) -> None:
    run, spec = RunDir(tmp_path), spec_of(run={"steps": 6})
    with pytest.raises(UserError, match="--resume: found 'no checkpoint.*--overwrite"):
        check_resumable(run, spec)
    write_checkpoint(stack_of(run, spec), 6)
    with pytest.raises(UserError, match="no checkpoint"):
        check_resumable(run, spec)
    publish_checkpoint(stack_of(run, spec), 6)
    check_resumable(run, spec)
    with pytest.raises(UserError, match=r"run\.steps: found 5, expected at least 6"):
        check_resumable(run, spec_of(run={"steps": 5}))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("numerics.preset", "fp8_block_fp32", "numerics: found 'spec digest .*as in the checkpoint of step 6"),
        ("numerics.mode", "native", "numerics.mode: found 'native', expected 'exact'"),
        ("numerics.trainer", "bf16", "numerics.trainer: found 'bf16', expected 'fp8'"),
        ("numerics.rollout", "bf16", "numerics.rollout: found 'bf16', expected 'fp8'"),
        ("algorithm.name", "sft", "algorithm.name: found 'sft', expected 'grpo'"),
        ("run.seed", 3, "run.seed: found 3, expected 0"),
        ("eval.problems", 5, "eval.problems: found 5"),
    ],
)
def test_a_run_keeps_what_makes_it_one_experiment(tmp_path: Path, key: str, value: Any, said: str) -> None:
    run = RunDir(tmp_path)
    write_checkpoint(stack_of(run, spec_of()), 6)
    publish_checkpoint(stack_of(run, spec_of()), 6)
    section, name = key.split(".")
    with pytest.raises(UserError, match=said):
        check_resumable(run, spec_of(**{section: {name: value}}))


def test_other_settings_may_change_and_are_said(tmp_path: Path) -> None:
    run, before = RunDir(tmp_path), spec_of(trainer={"lr": 1e-4})
    write_spec(run, before.to_dict())
    assert changes(run, before) == []
    after = spec_of(run={"steps": 90}, trainer={"lr": 1e-3}, gates=[{"metric": "train/loss", "above": 1.0}])
    said = changes(run, after)
    assert [text.split("=")[0] for text in said] == ["gates", "run.steps", "trainer.lr"]
    assert said[2] == "trainer.lr=0.001 (was 0.0001)"
