"""When a run's checkpoints are written, which of them stay, and what a resumed run may start from."""

from __future__ import annotations

import os
import shutil
from typing import Any

from numerics.errors import UserError, shown, user_error
from numerics.files import flush_to_disk
from rl.experiment import Experiment, read_resolved
from rl.guard.standing import Standing
from rl.record.events import read_events
from rl.record.metrics_log import read_metrics
from rl.record.run_dir import RunDir
from rl.run.ahead import FeedState
from trainer.actor import TrainerGroup
from trainer.checkpoint_files import DamagedCheckpointError, check_digests, check_sizes, read_about


def is_due(experiment: Experiment, step: int) -> bool:
    """Whether `step` ends with a checkpoint."""
    return step == experiment.run.steps or step % experiment.checkpoint.every == 0


def write_checkpoint(
    trainer: TrainerGroup,
    files: RunDir,
    experiment: Experiment,
    standing: Standing,
    step: int,
    feed: FeedState,
) -> None:
    """Write the checkpoint of `step` under a name that does not count yet."""
    extra = {"step": step, "kept": _kept(experiment), "standing": standing.to_dict(), "feed": feed.extra}
    trainer.save(files.pending_checkpoint(step), extra, feed.texts)


def publish_checkpoint(files: RunDir, step: int, keep: int) -> None:
    """Give it its name, once the step's metrics are on disk: a run never resumes after a step that has no row.

    Then remove all checkpoints but the newest `keep`, and what earlier interrupted runs left.
    """
    os.replace(files.pending_checkpoint(step), files.checkpoint(step))
    flush_to_disk(files.checkpoints)
    outdated = [files.checkpoint(old) for old in files.checkpoint_steps()[:-keep]]
    for directory in [*outdated, *files.checkpoints.glob(".*step_*")]:
        shutil.rmtree(directory)


def check_resumable(run: RunDir, experiment: Experiment) -> None:
    """Whether `spec` can go on from the newest checkpoint of `run`; damage inside its tensors is found when they load.

    Raises:
        UserError: there is none, a file of it is missing or cut off, a line of the run's record is damaged, it is
            beyond the last step, or it was trained with other numerics, another seed or another algorithm, or judged by
            other problems.
    """
    step = max(run.checkpoint_steps(), default=None)
    if step is None:
        raise user_error(
            "--resume",
            found=f"no checkpoint in {run.checkpoints}",
            expected="at least one",
            remedy="Start over with --overwrite.",
        )
    try:
        check_sizes(run.checkpoint(step))
    except DamagedCheckpointError as error:
        raise with_older(error, run, step) from None
    read_metrics(run.metrics)
    read_events(run.events)
    if step > experiment.run.steps:
        raise user_error(
            "run.steps",
            found=experiment.run.steps,
            expected=f"at least {step}, the step of the newest checkpoint",
            remedy=f"Set run.steps to {step} or more.",
        )
    if Standing.of_checkpoint(run, step).router_replay and experiment.numerics.router_replay == "off":
        raise user_error(
            "numerics.router_replay",
            found="off",
            expected="record, as a gate of this run has turned on the replay of the recorded routes",
            remedy="Set numerics.router_replay=record.",
        )
    trained = read_about(run.checkpoint(step)).extra["kept"]
    for key, value in _kept(experiment).items():
        if value != trained[key]:
            raise user_error(
                key,
                found=value,
                expected=f"{shown(trained[key])}, as in the checkpoint of step {step}",
                remedy=f"Resume with the settings of {run.experiment}, or start a new run under another run.name.",
            )


def with_older(error: DamagedCheckpointError, run: RunDir, step: int) -> UserError:
    """The error of the checkpoint of `step`, with the next older whole one as the remedy."""
    for older in reversed([other for other in run.checkpoint_steps() if other < step]):
        try:
            check_digests(run.checkpoint(older))
        except UserError:
            continue
        remedy = f"Delete {run.checkpoint(step)}: the next older one, of step {older}, is whole, and --resume takes it."
        return UserError(f"{error} {remedy}")
    return UserError(f"{error} No older one is whole: start over with --overwrite.")


def changes(run: RunDir, experiment: Experiment) -> list[str]:
    """The settings in which `spec` differs from the one that `run` was last started with, in words."""
    before, after = (_flat(values.to_dict()) for values in (read_resolved(run.experiment), experiment))
    keys = sorted(before.keys() | after.keys())
    return [f"{k}={after.get(k)} (was {before.get(k)})" for k in keys if after.get(k) != before.get(k)]


def _kept(experiment: Experiment) -> dict[str, Any]:
    """What a run keeps from its first step to its last: its curves would be of two experiments otherwise."""
    numerics = experiment.numerics_config()
    return {
        "numerics": f"spec digest {numerics.spec.digest()}",
        "numerics.mode": numerics.mode,
        "numerics.trainer": numerics.trainer,
        "numerics.rollout": numerics.rollout,
        "algorithm.name": experiment.algorithm.name,
        "run.seed": experiment.run.seed,
        "eval.problems": experiment.eval.problems,
    }


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
