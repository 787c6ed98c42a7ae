"""A command in this process."""

import io
import json
from pathlib import Path
from typing import Any

from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from fp8rl.cli import app
from fp8rl.diagnose.report import SCHEMA, Finding, Report


def result_of(*arguments: object, **options: Any) -> Result:
    """What `fp8rl` with these arguments came to. What it raises is raised here."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False, **options)


def invoke(*arguments: object) -> tuple[int, str]:
    """The exit code of `fp8rl` with these arguments, and all that it printed."""
    result = result_of(*arguments)
    return result.exit_code, result.output


def shown(what: object, width: int = 200) -> str:
    """What a terminal of this width would have."""
    output = io.StringIO()
    Console(file=output, width=width).print(what)
    return output.getvalue()


def by_the_command(capsule: Path) -> Report:
    """What `fp8rl explain` finds on a capsule in which something differs."""
    result = result_of("explain", capsule, "--json")
    assert result.exit_code == 1, result.output
    return report_of(result.stdout)


def report_of(text: str) -> Report:
    """The report of a command from its JSON."""
    values = json.loads(text)
    assert values.pop("schema") == SCHEMA
    findings = (Finding(**each | {"names": tuple(each["names"])}) for each in values.pop("findings"))
    return Report(**values, findings=tuple(findings))
