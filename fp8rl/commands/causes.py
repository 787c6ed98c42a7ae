"""Commands that look for causes: attribute and rescore after a run, and the studies of what is claimed about FP8."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from fp8rl.commands.shared import AsJson, end, progress, show, user_errors
from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.run.interrupts import interruptible


def attribute(
    subject: Annotated[Path, typer.Argument(metavar="RUN|CAPSULE", help="E.g. runs/demo, runs/demo/capsules/step_7.")],
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(help="Page to write; its numbers are written beside it as .json.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip causes that need further engines.")] = False,
) -> None:
    """Start both sides and find out where their mismatch comes from: by op, by cause, by expert and by position."""
    with user_errors(), redirect_stdout(sys.stderr):
        from fp8rl.diagnose.attribution.attribution_report import rendered, write_page
        from fp8rl.diagnose.attribution.offline import attribute_offline, read_subject
        from fp8rl.numerics.core.files import check_page, writing

        named = read_subject(subject)
        page = out or named.page
        key = "--out" if out else "report"
        check_page(page, key)
        check_page(page.with_suffix(".json"), key)
        with interruptible():
            found = attribute_offline(named, quick=quick, say=progress())
        with writing(page, key):
            write_page(found, named.name, page, named.compared)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
        return
    show(rendered(found, named.compared), f"\nreport   {page}", soft_wrap=True)
    if quick and named.numerics.mode == "native":
        show("left out  quantization and op definitions (--quick)")


def rescore(
    capsule: Annotated[Path, typer.Argument(metavar="CAPSULE", help="Directory, e.g. runs/demo/capsules/step_7.")],
    model: Annotated[Path | None, typer.Option(help="BF16 weights to use instead of the capsule's own.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score a capsule's sequences again, without Ray and engine. Exit code 0: reproduced, 1: not, 2: bad input."""
    with user_errors():
        from fp8rl.diagnose.rescore import print_rescored
        from fp8rl.diagnose.rescore import rescore as score_again
        from fp8rl.rl.record.console import PlainConsole

        result = score_again(capsule, model)
        if as_json:
            print(json.dumps(result.to_dict(), indent=1))
        else:
            print_rescored(result, PlainConsole())
    end(result.reproduced)


def study(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Studies to run.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Run all of them.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes, without verdicts.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Repetitions; by default as many as a verdict needs.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Copy results into docs/studies; needs a clean tree.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of results, with one for each study.")] = Path("runs/studies"),
) -> None:
    """Test claims about FP8, and write OUT/NAME with results, tables and figures.

    Exit code 0, 1 if a control does not hold, 2 for bad input.
    """
    with user_errors(), redirect_stdout(sys.stderr):
        _find_the_laboratory()
        from lab.studies.run import run_studies

        with interruptible():
            sound = run_studies(names or [], every=every, quick=quick, seeds=seeds, keep=keep, say=progress(), out=out)
    end(sound)


def _find_the_laboratory() -> None:
    """Have `lab` imported from the checkout. Raises UserError: this is an installation without one."""
    checkout = Path(__file__).parents[2]
    if not (checkout / "lab/studies").is_dir():
        raise user_error(
            "study",
            found="an installed fp8rl",
            expected="one in a checkout, as studies are in its folder lab/ and not in the package",
            remedy="Clone the repository, and run `make install` and `.venv/bin/fp8rl study` in it.",
        )
    sys.path.insert(0, str(checkout))
