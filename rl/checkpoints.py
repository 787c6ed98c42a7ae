"""When a run's checkpoints are written, which of them stay, and what a resumed run may start from."""

from __future__ import annotations

import json
import os
import shutil

from numerics.errors import user_error
from numerics.files import flush_to_disk
from rl.guard.standing import Standing
from rl.run_dir import RunDir
from rl.spec import ExperimentSpec
from rl.stack import Stack


def is_due(spec: ExperimentSpec, step: int) -> bool:
    """Whether `step` ends with a checkpoint."""
    return step == spec.run.steps or step % spec.checkpoint.every == 0


def write_checkpoint(stack: Stack, step: int) -> None:
    """Write the checkpoint of `step` under a name that does not count yet."""
    digest = stack.spec.numerics_config().spec.digest()
    extra = {"step": step, "spec_digest": digest, "standing": stack.standing.to_dict()}
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
        UserError: there is none, it is beyond the last step, or it was trained under another quantization spec.
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
    digest = spec.numerics_config().spec.digest()
    trained = json.loads((run.checkpoint(step) / "about.json").read_text())["extra"]["spec_digest"]
    if digest != trained:
        raise user_error(
            "numerics",
            found=f"spec digest {digest}",
            expected=f"{trained}, as in the checkpoint of step {step}",
            remedy=f"Resume with the numerics of {run.spec}, or start a new run.",
        )
