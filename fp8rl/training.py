"""One run of an experiment, for the `train` command and for a notebook."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numerics.errors import UserError
from rl.run.lifecycle.interrupts import SIGNALS, interruptible

if TYPE_CHECKING:
    from fp8rl.run import Run


class RunFailedError(RuntimeError):
    """A run has failed although its input and its code are right; it can be resumed. The cause says what failed."""


def train(
    spec: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_changed_data: bool = False,
    **overrides: Any,
) -> Run:
    """Train the experiment of a YAML file, as `fp8rl train` does, and return the run.

    It must be called in the main thread, which takes Ctrl-C. Where a gate has stopped the run, `Run.stopped` says so.

    Args:
        accept_changed_data: resume although files that the spec names have other contents than before.
        overrides: sections with the values that replace the spec's: `train("a.yaml", run={"steps": 2}, gates=[])`.

    Raises:
        UserError: the spec, or what it names, is wrong; nothing was started. RunFailedError: see there.
    """
    from fp8rl.run import Run

    if threading.current_thread() is not threading.main_thread():
        raise UserError("fp8rl.train: found another thread, expected the main one, which gets Ctrl-C. Call it there.")
    handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
    try:
        path, _ = run_experiment(
            Path(spec),
            list(_dotted(overrides)),
            resume=resume,
            overwrite=overwrite,
            accept_changed_data=accept_changed_data,
        )
    finally:
        for signum, handler in handlers.items():  # an interrupted command ignores further signals, a notebook goes on
            signal.signal(signum, handler)
    return Run(path)


def run_experiment(
    spec: Path,
    overrides: Sequence[str],
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_changed_data: bool = False,
) -> tuple[Path, str]:
    """Check the experiment, then run it to its end: the run's directory, and why it ended before its last step, if so.

    Raises:
        UserError, RunFailedError: see `train`.
    """
    if accept_changed_data and not resume:
        raise UserError("--accept-changed-data: found no --resume, expected both. A new run has nothing to compare.")
    print(f"fp8rl: checking {spec}", flush=True)  # the imports below take seconds
    from numerics.io.files import write_atomically
    from rl.experiment import load_experiment
    from rl.experiment.contents import contents
    from rl.experiment.preconditions import check
    from rl.record.run_dir import open_run_dir

    notes: list[str] = []

    def say(text: str) -> None:
        print(f"note: {text}", flush=True)
        notes.append(text)

    experiment = load_experiment(spec, overrides, say)
    check(experiment, say)
    chosen = {"resume": resume, "overwrite": overwrite}
    with interruptible(), open_run_dir(experiment.run.dir, experiment.run.name, **chosen) as files:
        from rl.loop import train as run_loop
        from rl.run.checkpoints import changes, check_contents, check_resumable
        from rl.run.lifecycle.attempts import FAILURES, attempted
        from rl.run.lifecycle.stopping import how_to_go_on, say_failed

        if resume:
            check_resumable(files, experiment)
            for change in changes(files, experiment):
                print(f"resuming with {change}")
            for text in check_contents(files, contents(experiment), accept_changed_data):
                print(text)
                notes.append(text)
        write_atomically(files.experiment, experiment.to_yaml())
        try:
            return files.path, attempted(experiment, files, run_loop, notes)
        except KeyboardInterrupt:
            print(how_to_go_on(files), file=sys.stderr)
            raise
        except FAILURES as error:
            say_failed(files, error)
            raise RunFailedError(str(error)) from error


def _dotted(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Each value as an override of the command line, `key.sub=value`; JSON is YAML."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{above}{name}.")
        else:
            yield f"{above}{name}={json.dumps(value, default=str)}"
