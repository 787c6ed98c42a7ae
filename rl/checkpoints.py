"""When a run's checkpoints are written, which of them stay, and what a resumed run may start from."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

from numerics.errors import shown, user_error
from numerics.files import flush_to_disk
from rl.guard.standing import Standing
from rl.run_dir import RunDir
from rl.spec import ExperimentSpec, read_resolved_spec
from rl.stack import Stack


def is_due(spec: ExperimentSpec, step: int) -> bool:
    """Whether `step` ends with a checkpoint."""
    return step == spec.run.steps or step % spec.checkpoint.every == 0


def write_checkpoint(stack: Stack, step: int) -> None:
    """Write the checkpoint of `step` under a name that does not count yet."""
    extra = {"step": step, "kept": _kept(stack.spec), "standing": stack.standing.to_dict()}
    stack.trainer.save(stack.run.pending_checkpoint(step), extra)


def publish_checkpoint(stack: Stack, step: int) -> None:
    """Give it its name, once the step's metrics are on disk: a run never resumes after a step that has no row.

    Then remove all checkpoints but the newest `checkpoint.keep`, and what earlier interrupted runs left.
    """
    run = stack.run
    os.replace(run.pending_checkpoint(step), run.checkpoint(step))
    flush_to_disk(run.checkpoints)
    outdated = [run.checkpoint(old) for old in run.checkpoint_steps()[: -stack.spec.checkpoint.keep]]
    for directory in [*outdated, *run.checkpoints.glob(".*step_*")]:
        shutil.rmtree(directory)


def check_resumable(run: RunDir, spec: ExperimentSpec) -> None:
    """Whether `spec` can go on from the newest checkpoint of `run`.

    Raises:
        UserError: there is none, it is beyond the last step, or it was trained with other numerics, another seed or
            another algorithm, or judged by other problems.
    """
    step = max(run.checkpoint_steps(), default=None)
    if step is None:
        raise user_error(
            "--resume",
            found=f"no checkpoint in {run.checkpoints}",
            expected="at least one",
            remedy="Start over with --overwrite.",
        )
    if step > spec.run.steps:
        raise user_error(
            "run.steps",
            found=spec.run.steps,
            expected=f"at least {step}, the step of the newest checkpoint",
            remedy=f"Set run.steps to {step} or more.",
        )
    if Standing.of_checkpoint(run, step).router_replay and spec.numerics.router_replay == "off":
        raise user_error(
            "numerics.router_replay",
            found="off",
            expected="record, as a gate of this run has turned on the replay of the recorded routes",
            remedy="Set numerics.router_replay=record.",
        )
    trained = json.loads((run.checkpoint(step) / "about.json").read_text())["extra"]["kept"]
    for key, value in _kept(spec).items():
        if value != trained[key]:
            raise user_error(
                key,
                found=value,
                expected=f"{shown(trained[key])}, as in the checkpoint of step {step}",
                remedy=f"Resume with the settings of {run.spec}, or start a new run under another run.name.",
            )


def changes(run: RunDir, spec: ExperimentSpec) -> list[str]:
    """The settings in which `spec` differs from the one that `run` was last started with, in words."""
    before, after = (_flat(values.to_dict()) for values in (read_resolved_spec(run.spec), spec))
    keys = sorted(before.keys() | after.keys())
    return [f"{k}={after.get(k)} (was {before.get(k)})" for k in keys if after.get(k) != before.get(k)]


def _kept(spec: ExperimentSpec) -> dict[str, Any]:
    """What a run keeps from its first step to its last: its curves would be of two experiments otherwise."""
    numerics = spec.numerics_config()
    return {
        "numerics": f"spec digest {numerics.spec.digest()}",
        "numerics.mode": numerics.mode,
        "numerics.trainer": numerics.trainer,
        "numerics.rollout": numerics.rollout,
        "algorithm.name": spec.algorithm.name,
        "run.seed": spec.run.seed,
        "eval.problems": spec.eval.problems,
    }


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
