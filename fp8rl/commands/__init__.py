"""The parts that commands share: arguments, exit codes and printing.

Modules of this package import little, so that the shell's completion does not wait for torch. Each command imports what
it needs when it is called.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8rl.numerics.core.errors import UserError, say_error, user_error
from fp8rl.numerics.core.files import is_full
from fp8rl.rl.run.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fp8rl.diagnose.report import Report

_PLACES = [Path(__file__).parents[up] / "examples" for up in (1, 2)]
EXAMPLES = next((place for place in _PLACES if place.is_dir()), _PLACES[0])
"""The folder of examples: in the installed package, or next to it in a checkout."""


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn errors that the user can correct (`UserError`, a full disk, a call of `sys.exit`) into a message and exit
    code 2, and Ctrl-C into exit code 130. Other errors keep their traceback."""
    try:
        yield
    except (UserError, OSError) as error:
        if not (isinstance(error, UserError) or is_full(error)):
            raise
        say_error(f"error: {error}")
        raise typer.Exit(2) from None
    except SystemExit as error:  # our commands raise none
        where = traceback.extract_tb(error.__traceback__)[-1]
        say_error(
            f"error: {where.filename}: found sys.exit() in line {where.lineno}, which ended the command, expected code "
            "that returns or raises an error. Correct it."
        )
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        say_error("interrupted; every process that was started is stopped")
        raise typer.Exit(INTERRUPTED) from None


def progress() -> Callable[[RenderableType], None]:
    """Return a function that prints a line to the standard error; the standard output is for the result."""
    from fp8rl.rl.record.console import PlainConsole

    return PlainConsole(stderr=True).print


def show(found: RenderableType) -> None:
    """Print a result to the standard output. A text is not broken into lines, so that it can be copied."""
    from fp8rl.rl.record.console import PlainConsole

    PlainConsole().print(found, soft_wrap=isinstance(found, str))


def finish(report: Report, as_json: bool) -> None:
    """Print a report, and end the command with its exit code."""
    print(report.to_json()) if as_json else show(report)
    end(report.ok)


def end(ok: bool) -> None:
    """End the command with exit code 1 unless `ok`."""
    if not ok:
        raise typer.Exit(1)


def refuse_given(context: typer.Context, names: Sequence[str], beside: str) -> None:
    """Refuse options of the command line that have no effect beside another argument.

    names: the command's parameters for these options. beside: the other argument, in words.

    Raises UserError: such options were given; the message names them.
    """
    options = {each.name: each.opts[0] for each in context.command.params}
    given = [name for name in names if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if given:
        raise user_error(
            ", ".join(options[name] for name in given),
            found=" ".join(str(context.params[name]) for name in given),
            expected=f"none beside {beside}",
            remedy="Leave it out.",
        )


# The arguments that several commands have.

SpecPath = Annotated[Path, typer.Argument(metavar="SPEC", help="YAML experiment spec.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values that replace the spec's, e.g. run.steps=2.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the run's last checkpoint.")]
AcceptChangedData = Annotated[
    bool, typer.Option("--accept-changed-data", help="Resume even if data, functions or models have changed.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Rename an earlier run of this name first, to NAME.replaced-TIME.")
]
ArchitectureFile = Annotated[
    Path | None, typer.Option("--architecture", help="File with the architecture of a MODEL that fp8rl does not have.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
