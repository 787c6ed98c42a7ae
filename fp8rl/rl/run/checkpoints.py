"""Checkpoints of a run: when they are written, which of them are kept, and what a resumed run may start from."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from fp8rl.numerics.core.errors import UserError, shown, user_error
from fp8rl.numerics.core.files import flush_to_disk
from fp8rl.numerics.core.reading import RESTORE
from fp8rl.numerics.core.section import dotted, validated
from fp8rl.rl.experiment import Experiment, read_resolved
from fp8rl.rl.experiment.contents import Content
from fp8rl.rl.guard.guard import GateState
from fp8rl.rl.record.history import read_events
from fp8rl.rl.record.metrics_log import read_metrics
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.run.feed.state import FeedState
from fp8rl.trainer.actor import TrainerDiedError, TrainerGroup
from fp8rl.trainer.checkpoint.files import CONTENT, DamagedCheckpointError, check_digests, check_sizes, read_about

_UNFINISHED = re.compile(r"\.+step_\d+(\.(partial|pending|retired))+")
"""Names that a checkpoint has while it is written or removed."""
_CONTENTS = "contents"
"""The key in `About.extra` with the digests of the files that the spec names. Older checkpoints lack this key."""
_SPEC = "spec.yaml"
"""The file of a checkpoint with the spec of the run, whose own the user may edit. Older checkpoints lack it."""
_DIGESTS = TypeAdapter(dict[str, Content])
_LAYOUT = {"trainer.tp", "trainer.pp", "trainer.ep", "trainer.dp", "trainer.cp", "rollout.tp", "teacher.tp"}


def is_due(experiment: Experiment, step: int) -> bool:
    return step == experiment.run.steps or step % experiment.checkpoint.every == 0


class Checkpoints:
    """Writes a run's checkpoints in the background, one at a time, and removes outdated checkpoints.

    If writing a checkpoint fails, the next call raises the error.
    """

    def __init__(self, files: RunDir, experiment: Experiment, held: Mapping[str, Content] | None = None) -> None:
        """held: digests of the files that the experiment names, which a resumed run compares."""
        self._files, self._experiment, self._held = files, experiment, dict(held or {})
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._trainer: TrainerGroup | None = None
        self._written: tuple[int, Future[None]] | None = None
        self._named: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the last checkpoint, whatever ended the run, unless the trainer is lost or an interrupt came."""
        if self._trainer is not None and kind is not None and issubclass(kind, KeyboardInterrupt | TrainerDiedError):
            self._trainer.shutdown()
        self._thread.shutdown()

    def begin(self, trainer: TrainerGroup, gate_state: GateState, step: int, feed: FeedState) -> None:
        """Wait for the last checkpoint, copy the state, and have it written under a temporary name."""
        self.wait()
        standing = dataclasses.asdict(gate_state)
        extra = {"step": step, "kept": _kept(self._experiment), "standing": standing, "feed": feed.extra}
        extra[_CONTENTS] = {key: dataclasses.asdict(content) for key, content in self._held.items()}
        if (content := self._experiment.checkpoint.content) != "all":
            extra[CONTENT] = content
        path = self._files.pending_checkpoint(step)
        trainer.stage(path, extra, {**feed.texts, _SPEC: self._experiment.to_yaml()})
        self._trainer = trainer
        self._written = step, self._thread.submit(trainer.write, path)

    def recorded(self) -> None:
        """Note that the row of the step is on disk. A checkpoint of the step then gets its name once it is written.

        So a run never resumes after a step that has no row.
        """
        if self._named is not None and self._named.done():
            self.wait()
        if self._written is not None:
            self._named = self._thread.submit(self._publish, *self._written)
            self._written = None

    def wait(self) -> None:
        """Wait until the last checkpoint has its name."""
        if self._named is not None:
            self._named.result()
            self._named = None

    def _publish(self, step: int, written: Future[None]) -> None:
        written.result()
        os.replace(self._files.pending_checkpoint(step), self._files.checkpoint(step))
        flush_to_disk(self._files.checkpoints)
        outdated = self._files.checkpoint_steps()[: -self._experiment.checkpoint.keep]
        given_up = [path for path in self._files.checkpoints.iterdir() if _UNFINISHED.fullmatch(path.name)]
        for directory in [*map(self._files.checkpoint, outdated), *given_up]:
            shutil.rmtree(directory, ignore_errors=True)


def check_resumable(run: RunDir, experiment: Experiment) -> None:
    """Check that `experiment` can go on from the newest checkpoint of `run`.

    Damage inside the checkpoint's tensors is found when they load.

    Raises:
        UserError: there is no checkpoint, a file of it is missing or cut off, it is beyond the last step, a line of the
            run's record is damaged, or the run had other numerics, another seed or algorithm, or other evaluation
            problems.
    """
    step = max(run.checkpoint_steps(), default=None)
    if step is None:
        raise user_error(
            "--resume", f"no checkpoint in {run.checkpoints}", "at least one", "Start over with --overwrite."
        )
    try:
        check_sizes(run.checkpoint(step))
    except DamagedCheckpointError as error:
        raise with_older(error, run, step) from None
    read_metrics(run.metrics)
    read_events(run.events)
    if step > experiment.run.steps:
        expected = f"at least {step}, the step of the newest checkpoint"
        raise user_error("run.steps", experiment.run.steps, expected, f"Set run.steps to {step} or more.")
    if GateState.of_checkpoint(run, step).router_replay and experiment.numerics.router_replay == "off":
        expected = "record, as a gate of this run has turned on the replay of the recorded routes"
        raise user_error("numerics.router_replay", "off", expected, "Set numerics.router_replay=record.")
    kept = read_about(run.checkpoint(step)).extra.get("kept")
    trained = kept if isinstance(kept, dict) else {}
    for key, value in _kept(experiment).items():
        if value != trained.get(key):
            if key == "numerics":  # a digest alone does not say what to set back
                value += ", by " + ", ".join(said for said in changes(run, experiment) if said.startswith("numerics."))
            expected = f"{shown(trained.get(key))}, as in the checkpoint of step {step}"
            remedy = f"Resume with the settings of {_spec_of(run)}, or start a new run under another run.name."
            raise user_error(key, value, expected, remedy)


def check_contents(run: RunDir, held: Mapping[str, Content], accept: bool) -> list[str]:
    """Compare the files that the spec names with the digests in the newest checkpoint; return remarks on differences.

    held: the files' present digests. accept: allow changed contents. `changes` reports keys with another value.
    Raises UserError: the contents of some files have changed, and `accept` is false.
    """
    step = max(run.checkpoint_steps())
    kept = read_about(run.checkpoint(step)).extra.get(_CONTENTS)
    if kept is None:
        return [
            f"the checkpoint of step {step} has no digests of data and functions: whether they changed is not known"
        ]
    before = validated(_DIGESTS.validate_python, kept, f"checkpoint of step {step}: {_CONTENTS}", RESTORE)
    changed = [
        (key, now.said)
        for key, now in held.items()
        if key in before and before[key].said == now.said and before[key].digest != now.digest
    ]
    if changed and not accept:
        lines = [f"{key}: found other contents of {said} than the run was trained with" for key, said in changed]
        raise UserError(
            "; ".join(lines) + f", expected the contents of step {step}'s checkpoint. Restore them, start a new run "
            "under another run.name, or continue with --accept-changed-data."
        )
    return [f"resuming with other contents of {key}: {said}" for key, said in changed]


def begins_anew(run: RunDir, step: int) -> str:
    """Return, as a clause, what begins again in a run resumed from the checkpoint of `step`; empty if nothing does."""
    if read_about(run.checkpoint(step)).extra.get(CONTENT) != "weights":
        return ""
    return ", from weights alone (checkpoint.content): Adam and the FP32 master weights begin anew"


def with_older(error: DamagedCheckpointError, run: RunDir, step: int) -> UserError:
    """Return the error of the damaged checkpoint of `step`, with the next older whole checkpoint as the remedy."""
    for older in reversed([other for other in run.checkpoint_steps() if other < step]):
        try:
            check_digests(run.checkpoint(older))
        except UserError:
            continue
        remedy = f"Delete {run.checkpoint(step)}: the next older one, of step {older}, is whole, and --resume takes it."
        return UserError(f"{error} {remedy}")
    return UserError(f"{error} No older checkpoint is whole: start over with --overwrite.")


def _spec_of(run: RunDir) -> Path:
    kept = run.checkpoint(max(run.checkpoint_steps(), default=0)) / _SPEC
    return kept if kept.is_file() else run.experiment


def changes(run: RunDir, experiment: Experiment) -> list[str]:
    """Return, in words, the settings in which `experiment` differs from those of the newest checkpoint of `run`."""
    before, after = (
        {key: value for key, value in dotted(each.to_dict()) if value != {}}
        for each in (read_resolved(_spec_of(run)), experiment)
    )
    changed = [key for key in sorted(before.keys() | after.keys()) if after.get(key) != before.get(key)]
    said = [f"{key}={after.get(key)} (was {before.get(key)})" for key in changed]
    if _LAYOUT.intersection(changed):
        said.append("another layout adds numbers in another order: bits may differ from here on")
    return said


def _kept(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that a run must keep from its first step to its last, to be one experiment."""
    numerics = experiment.numerics_config()
    scales = f"{numerics.key_scale:g} and {numerics.value_scale:g}"
    return {
        "numerics": f"spec digest {numerics.spec.digest()}",
        "numerics.mode": numerics.mode,
        "numerics.trainer": numerics.trainer,
        "numerics.rollout": numerics.rollout,
        # None for BF16, which checkpoints without this key have.
        "numerics.kv": None if numerics.kv == "bf16" else f"fp8, scales {scales}",
        "algorithm.name": experiment.algorithm.name,
        "run.seed": experiment.run.seed,
        "adapter": None if experiment.adapter is None else experiment.adapter.model_dump(mode="json"),
        "eval.problems": experiment.eval.problems,
    }
