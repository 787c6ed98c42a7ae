"""Commands that make a run, or show one: train, demo, submit, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8rl.commands.shared import AcceptChangedData, Overrides, Overwrite, Resume, SpecPath, end, show, user_errors
from fp8rl.numerics.io.terminal import say_error
from fp8rl.rl.run.lifecycle.interrupts import interruptible
from fp8rl.rl.run.lifecycle.stopping import STOPPED
from fp8rl.training import RunFailedError, run_experiment

DEMO_SPEC = Path("examples/arithmetic.yaml")
INSTALLED = Path(__file__).parents[1]
"""What the distribution has of the examples is below it."""


def train(
    spec: SpecPath,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    accept_changed_data: AcceptChangedData = False,
) -> None:
    """Run an experiment: start or join Ray, train, and write runs/NAME with metrics, checkpoints and a report.

    Exit code 0, 2 for bad input, 3 if a gate or a failure has stopped the run, 130 if a signal has.
    """
    with user_errors():
        _train(spec, overrides or [], resume=resume, overwrite=overwrite, accept_changed_data=accept_changed_data)


def demo(overrides: Overrides = None) -> None:
    """Train the tiny MoE of the examples in exact FP8 on this machine, and say what came of it.

    It replaces an earlier runs/demo.
    """
    with user_errors():
        spec = DEMO_SPEC if DEMO_SPEC.is_file() else INSTALLED / DEMO_SPEC
        _train(spec, ["run.name=demo", *(overrides or [])], overwrite=True)


def submit(
    spec: SpecPath,
    address: Annotated[str, typer.Option(help="The cluster's dashboard, e.g. http://127.0.0.1:8265.")],
    overrides: Overrides = None,
    wait: Annotated[bool, typer.Option("--wait", help="Show what the job says, and end with it.")] = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    accept_changed_data: AcceptChangedData = False,
) -> None:
    """Run an experiment as a job of a Ray cluster, whose nodes see this directory.

    Exit code 0, 1 if the job that was waited for did not succeed, 2 for bad input.
    """
    with user_errors():
        from fp8rl.rl.experiment import load_experiment
        from fp8rl.rl.run.cluster import submission

        load_experiment(spec, overrides or [])  # what it would refuse, it refuses here
        flags = ["--resume"] * resume + ["--overwrite"] * overwrite
        flags += ["--accept-changed-data"] * accept_changed_data
        arguments = [str(spec.absolute()), *(overrides or []), *flags]
        done = submission.submit(arguments, address, wait=wait, say=lambda text: show(text, soft_wrap=True))
    end(done)


def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, e.g. runs/demo.")]) -> None:
    """Write the run's report.html: a self-contained page with curves, verdict, sample rollouts and the spec."""
    with user_errors():
        from fp8rl.rl.report.report import write_report

        with interruptible():
            page, damage = write_report(run)
        show(str(page), soft_wrap=True)
    for line in damage:
        say_error(f"damaged: {line}")


def _train(spec: Path, overrides: list[str], **options: bool) -> None:
    try:
        _, stopped = run_experiment(spec, overrides, **options)
    except RunFailedError:  # it has said why
        raise typer.Exit(STOPPED) from None
    if stopped:
        raise typer.Exit(STOPPED)
