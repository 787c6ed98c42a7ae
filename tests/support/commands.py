"""A command in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from fp8rl.cli import app


def invoke(*arguments: object) -> tuple[int, str]:
    """The exit code of `fp8rl` with these arguments, and all that it printed. What it raises is raised here."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    return result.exit_code, result.output
