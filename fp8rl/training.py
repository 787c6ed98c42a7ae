"""Runs an experiment, for the `train` command and for notebooks."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8rl.numerics.core.errors import UserError, say, say_error
from fp8rl.rl.run.interrupts import SIGNALS, interruptible

if TYPE_CHECKING:
    from fp8rl.rl.experiment import Experiment
    from fp8rl.rl.run.run import LiveRun
    from fp8rl.run import Run


class RunFailedError(RuntimeError):
    """A run has failed although its input and its code are right; it can be resumed. `__cause__` is the failure."""


def train(
    spec: str | Path | Mapping[str, Any] | Experiment,
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_changed_data: bool = False,
    **overrides: Any,
) -> Run:
    """Train an experiment, as `fp8rl train` does, and return the run.

    It must be called in the main thread, which takes Ctrl-C. If a gate has stopped the run, `Run.stopped` says so.

    Args:
        spec: a YAML file; a mapping with the same keys, whose paths are relative to the current directory; or an
            `Experiment`.
        resume: go on from the run's last checkpoint.
        overwrite: rename an earlier run of this name first, to NAME.replaced-TIME.
        accept_changed_data: resume although files that the spec names have other contents than before.
        overrides: sections with the values that replace the spec's: `train("a.yaml", run={"steps": 2}, gates=[])`.

    Raises:
        UserError: the spec, or something that it names, is wrong; nothing was started. RunFailedError: the run failed.
    """
    from fp8rl.run import Run

    if threading.current_thread() is not threading.main_thread():
        raise UserError("fp8rl.train: found another thread, expected the main one, which gets Ctrl-C. Call it there.")
    handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
    try:
        path, _ = run_experiment(
            spec,
            list(_as_overrides(overrides)),
            resume=resume,
            overwrite=overwrite,
            accept_changed_data=accept_changed_data,
        )
    finally:
        for signum, handler in handlers.items():  # an interrupted command ignores further signals, a notebook goes on
            signal.signal(signum, handler)
    return Run(path)


def run_experiment(
    spec: str | Path | Mapping[str, Any] | Experiment,
    overrides: Sequence[str],
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_changed_data: bool = False,
) -> tuple[Path, str]:
    """Check the experiment and run it. Return the run's directory, and why it ended before its last step, if it did.

    Raises:
        UserError, RunFailedError: see `train`.
    """
    if accept_changed_data and not resume:
        raise UserError("--accept-changed-data: found no --resume, expected both. A new run has nothing to compare.")
    shown = spec if isinstance(spec, str | Path) else "the spec"
    say(f"fp8rl: checking {shown}")  # the imports below take seconds
    from fp8rl.numerics.core.files import write_atomically
    from fp8rl.rl.experiment import load_experiment, read_resolved
    from fp8rl.rl.experiment.contents import contents, fetched
    from fp8rl.rl.experiment.preconditions import check
    from fp8rl.rl.record.run_dir import RunDir, open_run_dir

    notes: list[str] = []

    def note(text: str) -> None:
        say(f"note: {text}")
        notes.append(text)

    experiment = load_experiment(spec, overrides, note)
    before = RunDir(Path(experiment.run.dir) / experiment.run.name)
    goes_on = resume and before.checkpoint_steps()
    experiment = fetched(experiment, read_resolved(before.experiment) if goes_on else None)
    check(experiment, note)
    opened = open_run_dir(
        experiment.run.dir,
        experiment.run.name,
        resume=resume,
        overwrite=overwrite,
        shared=experiment.run.shared,
        reads=[*([Path(spec)] if isinstance(spec, str | Path) else []), *_paths_in(experiment.to_dict())],
    )
    with interruptible(), opened as files:
        from fp8rl.rl.loop import train as run_loop
        from fp8rl.rl.run.checkpoints import changes, check_contents, check_resumable, how_to_go_on, say_failed
        from fp8rl.rl.run.restarts import FAILURES, run_with_restarts

        if resume:
            check_resumable(files, experiment)
            for change in changes(files, experiment):
                say(text := f"resuming with {change}")
                notes.append(text)
            for text in check_contents(files, contents(experiment), accept_changed_data):
                say(text)
                notes.append(text)
        else:
            write_atomically(files.experiment, experiment.to_yaml())

        def loop(run: LiveRun) -> str:
            if resume:  # a resume that does not get this far leaves the spec as it was, so that the next names changes
                write_atomically(files.experiment, experiment.to_yaml())
            return run_loop(run)

        try:
            return files.path, run_with_restarts(experiment, files, loop, notes)
        except KeyboardInterrupt:
            say_error(how_to_go_on(files))
            raise
        except FAILURES as error:
            say_failed(files, error)
            raise RunFailedError(str(error)) from error


def _as_overrides(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield each value as an override of the command line, `key.sub=value`; JSON is YAML."""
    from fp8rl.numerics.core.section import dotted
    from fp8rl.rl.experiment.loading import plain

    for key, value in dotted(values):
        yield f"{key}={json.dumps(value, default=plain, ensure_ascii=False)}"


def _paths_in(values: Any) -> Iterator[Path]:
    """Yield each file that a resolved experiment names, as an absolute path; for `file.py:function`, the file."""
    if isinstance(values, Mapping | list):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _paths_in(value)
    elif isinstance(values, str) and values.startswith("/") and "\0" not in values:
        yield Path(values.rpartition(":")[0] if re.search(r"\.py:\w+$", values) else values)
