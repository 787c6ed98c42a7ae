"""Commands that make or show runs (init, train, demo, submit, report, runs), and study, which tests claims."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from fp8rl.commands import (
    EXAMPLES,
    AcceptChangedData,
    Overrides,
    Overwrite,
    Resume,
    SpecPath,
    end,
    progress,
    refuse_given,
    show,
    user_errors,
)
from fp8rl.numerics.core.errors import say_error, user_error
from fp8rl.numerics.core.files import check_writable, new_directory, writing
from fp8rl.rl.run.interrupts import STOPPED, interruptible
from fp8rl.training import RunFailedError, run_experiment


def train(
    spec: SpecPath,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    accept_changed_data: AcceptChangedData = False,
) -> None:
    """Run an experiment: start or join Ray, train, and write runs/NAME with metrics, checkpoints and a report.

    Exit codes: 0 success, 2 bad input, 3 stopped by a gate or a failure, 130 stopped by a signal.
    """
    with user_errors():
        _train(spec, overrides or [], resume=resume, overwrite=overwrite, accept_changed_data=accept_changed_data)


def demo(overrides: Overrides = None) -> None:
    """Train the tiny MoE of the examples in exact FP8 on this machine, and print the result.

    It replaces an earlier runs/demo.
    """
    with user_errors():
        _train(EXAMPLES / "arithmetic.yaml", ["run.name=demo", *(overrides or [])], overwrite=True)


def submit(
    spec: SpecPath,
    address: Annotated[str, typer.Option(help="The cluster's dashboard, e.g. http://127.0.0.1:8265.")],
    overrides: Overrides = None,
    wait: Annotated[bool, typer.Option("--wait", help="Show the job's output, and end when it ends.")] = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    accept_changed_data: AcceptChangedData = False,
) -> None:
    """Run an experiment as a job of a Ray cluster, whose nodes see this directory.

    Exit codes: 0 success, 1 the job failed (with --wait), 2 bad input.
    """
    with user_errors():
        import asyncio

        import aiohttp
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobStatus, JobSubmissionClient

        from fp8rl.rl.experiment import load_experiment

        load_experiment(spec, overrides or [])  # a wrong spec is refused here, before a job starts
        flags = ["--resume"] * resume + ["--overwrite"] * overwrite
        flags += ["--accept-changed-data"] * accept_changed_data
        command = [str(Path(sys.executable).with_name("fp8rl")), "train", str(spec.absolute()), *(overrides or [])]

        async def follow() -> None:
            async for text in client.tail_job_logs(job):
                show(text.rstrip("\n"))

        try:
            if not re.fullmatch(r"https?://[\w.\-:@\[\]]+/?", address, re.ASCII):  # Ray would import another scheme
                raise ValueError("it is not http://HOST:PORT")
            client = JobSubmissionClient(address)
            # From this directory, so that relative paths mean what they mean here.
            job = client.submit_job(
                entrypoint=f"cd {shlex.quote(os.getcwd())} && exec {shlex.join([*command, *flags])}"
            )
            show(f"job      {job}")
            if wait:
                asyncio.run(follow())
                status = client.get_job_status(job)
        except (AuthenticationError, OSError, RuntimeError, ValueError, aiohttp.ClientError) as error:
            raise user_error(
                "--address",
                found=address,
                expected="the dashboard of a Ray cluster that accepts jobs, as http://HOST:PORT",
                remedy=f"The error was: {(str(error) or repr(error)).splitlines()[0].rstrip('.')}. "
                "Correct it; `ray start --head` prints it. For tokens, set RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH.",
            ) from None
        if wait:
            show(f"job      {job}: {status}")
        else:
            show(f"watch    ray job logs --follow --address {address} {job}")
            show(f"stop     ray job stop --address {address} {job}")
    end(not wait or status == JobStatus.SUCCEEDED)


def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, e.g. runs/demo.")]) -> None:
    """Write the run's report.html: a self-contained page with curves, verdict, sample rollouts and the spec."""
    with user_errors():
        from fp8rl.rl.report.report import write_report

        with interruptible():
            page, damage = write_report(run)
        show(str(page))
    for line in damage:
        say_error(f"damaged: {line}")


def _train(spec: Path, overrides: list[str], **options: bool) -> None:
    try:
        _, stopped = run_experiment(spec, overrides, **options)
    except RunFailedError as error:  # it has said why
        raise typer.Exit(error.exit_code) from None
    if stopped:
        raise typer.Exit(STOPPED)


def runs(
    context: typer.Context,
    one: Annotated[str | None, typer.Argument(metavar="A", help="A run, by name or path.")] = None,
    other: Annotated[str | None, typer.Argument(metavar="B", help="The run to compare it with.")] = None,
    folder: Annotated[Path, typer.Option("--dir", help="Where the runs are.")] = Path("runs"),
    every: Annotated[bool, typer.Option("--all", help="Show equal metrics too.")] = False,
    page: Annotated[
        Path | None, typer.Option("--page", help="Also write an HTML page with the curves of both in one chart.")
    ] = None,
) -> None:
    """List the runs of a folder, or show where the specs and final metrics of two runs differ."""
    with user_errors():
        from fp8rl.comparing import listed, metrics_compared, runs_in, specs_compared, write_comparison
        from fp8rl.numerics.core.files import check_page, writing
        from fp8rl.numerics.core.reading import check_path
        from fp8rl.run import Run

        check_path(folder, "--dir")
        for name in filter(None, (one, other)):
            check_path(name, "runs")
        if page is not None:
            check_page(page, "--page")
        if one is not None:
            if other is None:
                raise user_error("runs", found="one name", expected="none or two", remedy=f"Write fp8rl runs {one} B.")
            found = [Run(Path(name) if Path(name).is_dir() else folder / name) for name in (one, other)]
            tables = [specs_compared(*found), metrics_compared(*found, every=every)]
        else:
            refuse_given(context, ["every"], "a list, because it needs two runs to compare")
            found = runs_in(folder)
            tables = [listed(found)]
        for table in tables:
            show(table.rendered())
        if page is not None:
            with writing(page, "--page"):
                write_comparison(page, found, tables)
            show(str(page))


def study(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Studies to run.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Run all of them.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes, without verdicts.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Repetitions; by default as many as a verdict needs.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Copy results into lab/docs; needs a clean tree.")] = False,
    out: Annotated[Path, typer.Option(help="Folder with one folder of results per study.")] = Path("runs/studies"),
) -> None:
    """Test claims about FP8, and write OUT/NAME with results, tables and figures.

    Exit codes: 0 all controls hold, 1 a control does not hold, 2 bad input.
    """
    with user_errors(), redirect_stdout(sys.stderr):
        checkout = Path(__file__).parents[2]
        if not (checkout / "lab/studies").is_dir():
            raise user_error(
                "study",
                found="an installed fp8rl",
                expected="fp8rl in a checkout, whose folder lab/ has the studies",
                remedy="Clone the repository, and run `make install` and `.venv/bin/fp8rl study` in it.",
            )
        sys.path.insert(0, str(checkout))
        from lab.studies.run import run_studies

        with interruptible():
            sound = run_studies(names or [], every=every, quick=quick, seeds=seeds, keep=keep, say=progress(), out=out)
    end(sound)


SCHEMA = Path(__file__).parents[1] / "spec.schema.json"


def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")]) -> None:
    """Write a first experiment that runs as it is: a spec, a reward, problems, a tiny model, and what to change."""
    with user_errors():
        check_writable(folder, "DIR")
        if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            raise user_error("DIR", str(folder), "a new folder, or an empty one", "Choose another name.")
        with writing(folder, "DIR"):
            folder.mkdir(parents=True, exist_ok=True)
            with new_directory(folder / ".new") as whole:  # a disk that is full leaves nothing
                shutil.copytree(EXAMPLES / "models/tiny_qwen3_moe", whole / "model")
                for path in filter(Path.is_file, (EXAMPLES / "first").iterdir()):
                    shutil.copyfile(path, whole / path.name)  # not its mode: an install may be read-only
                shutil.copy(SCHEMA, whole)
            for path in (folder / ".new").iterdir():
                path.rename(folder / path.name)
            (folder / ".new").rmdir()
        for path in sorted(folder.iterdir()):
            show(str(path))
        show(f"\ncd {folder} && fp8rl train spec.yaml")
