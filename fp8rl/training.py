"""Runs an experiment: in this process, for the `train` command, or in a process of its own, for notebooks."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from typing import TYPE_CHECKING, Any

from fp8rl import supervising
from fp8rl.numerics.core.errors import UserError, say, say_error
from fp8rl.rl.run.interrupts import STOPPED, interruptible

if TYPE_CHECKING:
    from fp8rl.rl.experiment import Experiment
    from fp8rl.run import Run


class RunFailedError(RuntimeError):
    """A run has failed although its input and its code are right; it can be resumed.

    Attributes:
        exit_code: the command's exit code.
    """

    def __init__(self, why: str, exit_code: int = STOPPED) -> None:
        super().__init__(why)
        self.exit_code = exit_code


def train(
    spec: str | Path | Mapping[str, Any] | Experiment,
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_changed_data: bool = False,
    **overrides: Any,
) -> Run:
    """Train an experiment by `fp8rl train` in a process of its own, whose console is printed here; return the run.

    If a gate has stopped the run, `Run.stopped` says so. An interrupt ends the process, and is then raised here.

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
    from fp8rl.rl.experiment import load_experiment
    from fp8rl.run import Run

    values = list(_as_overrides(overrides))
    experiment = load_experiment(spec, values, lambda text: None)
    options = {"--resume": resume, "--overwrite": overwrite, "--accept-changed-data": accept_changed_data}
    given = [option for option, chosen in options.items() if chosen]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="fp8rl-") as file:
        if not isinstance(spec, str | Path):
            file.write(experiment.to_yaml())
            file.flush()
            spec, values = file.name, []
        code, printed = _shown([_PROGRAM, "train", *given, "--", str(spec), *values])
    errors = [number for number, line in enumerate(printed) if line.startswith("error: ")]
    last = printed[errors[-1] if errors else -1 :] or ["it said nothing"]
    if code == 2:
        raise UserError("\n".join(last).removeprefix("error: "))
    if code not in (0, STOPPED) or (code and errors):
        raise RunFailedError(last[0].removeprefix("error: "), code)
    return Run(Path(experiment.run.dir) / experiment.run.name)


_PROGRAM = "from fp8rl import cli, supervising; supervising.end_with_parent(); cli.main()"


def _shown(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run Python's `-c` with a command line, and print what it prints; return its exit code and its lines."""
    printed: list[str] = []
    with Popen(
        [sys.executable, "-c", *command], stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                say(line.rstrip("\n"))
                printed.append(line.rstrip("\n"))
        except BaseException:
            process.terminate()
            raise
    return process.returncode, printed


def run_experiment(
    spec: str | Path | Mapping[str, Any] | Experiment,
    overrides: Sequence[str],
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_changed_data: bool = False,
) -> tuple[Path, str]:
    """Check the experiment and run it. Return the run's directory, and why it ended before its last step, if it did.

    A supervised run that has lost its trainer or Ray is started again, and goes on from its last checkpoint.
    Raises UserError, RunFailedError: see `train`.
    """
    if accept_changed_data and not resume:
        raise UserError("--accept-changed-data: found no --resume, expected both. A new run has nothing to compare.")
    again = bool(supervising.restarts)
    if again:
        resume, overwrite, accept_changed_data = True, False, True
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
        from fp8rl.rl.run.checkpoints import changes, check_contents, check_resumable
        from fp8rl.rl.run.ending import FAILURES, finish, how_to_go_on, say_failed
        from fp8rl.rl.run.run import open_run
        from fp8rl.trainer.actor import TrainerDiedError

        if goes_on or (resume and not again):  # what was lost before its first checkpoint has nothing to resume
            check_resumable(files, experiment)
            for text in (f"resuming with {change}" for change in changes(files, experiment)):
                say(text)
                notes.append(text)
            for text in check_contents(files, contents(experiment), accept_changed_data):
                say(text)
                notes.append(text)
        elif not again:
            write_atomically(files.experiment, experiment.to_yaml())
        left = None if supervising.restarts is None else experiment.run.restarts - supervising.restarts
        begun = again
        try:
            with open_run(experiment, files, notes, again=again, left=left) as run:
                begun = True
                if resume:  # a resume that does not get this far leaves the spec, so that the next names changes
                    write_atomically(files.experiment, experiment.to_yaml())
                stopped = run_loop(run)
                finish(run.record, stopped)
            return files.path, stopped
        except KeyboardInterrupt:
            say_error(how_to_go_on(files))
            raise
        except FAILURES as error:
            lost = begun and isinstance(error, TrainerDiedError)
            raise RunFailedError(str(error), say_failed(files, error, left if lost else None)) from error


def _as_overrides(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield each value as the command line's override `key.sub=JSON`, which YAML can read."""
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
