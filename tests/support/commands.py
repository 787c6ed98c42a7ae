"""A command in this process."""

from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from fp8rl.cli import app
from fp8rl.diagnose.report import Report


def result_of(*arguments: object, **options: Any) -> Result:
    """What `fp8rl` with these arguments came to. What it raises is raised here."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False, **options)


def invoke(*arguments: object) -> tuple[int, str]:
    """The exit code of `fp8rl` with these arguments, and all that it printed."""
    result = result_of(*arguments)
    return result.exit_code, result.output


def by_the_command(capsule: Path) -> Report:
    """What `fp8rl explain` finds on a capsule in which something differs."""
    result = result_of("explain", capsule, "--json")
    assert result.exit_code == 1, result.output
    return Report.from_json(result.stdout)
