"""The `fp8rl` command: its list of commands, and its entry point."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.core

import fp8rl
from fp8rl.commands import diagnosis, models, runs
from fp8rl.commands.runs import init
from fp8rl.numerics.core.errors import say_error
from fp8rl.numerics.core.reading import at_home
from fp8rl.rl.run.interrupts import end_on_signal
from fp8rl.rollout.loopback import reach_loopback
from fp8rl.supervising import supervise

try:
    from fp8rl_certify.cli import certify
except ModuleNotFoundError:
    certify = diagnosis.certify_elsewhere  # type: ignore[assignment]

_EXIT_SECONDS = 60.0
"""Longest time between the end of a command and the end of its process."""
REPLACED = {"preflight": "doctor", "audit": "doctor", "attribute": "explain", "rescore": "explain --quick"}
"""Former commands, each with its replacement."""
_SUPERVISED = {"train", "demo", "doctor", "explain", "eval", "serve", "convert", "warm", "study", *REPLACED}
"""Long commands, most of which start engines. Each runs in a child process (see `supervising`)."""


class Commands(typer.core.TyperGroup):
    """The group of all commands. It expands `~` in arguments, because shells do not in quotes or after `=`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parts = (arg.split("=", 1) if arg.startswith("--") else [arg] for arg in args)
        return super().parse_args(ctx, ["=".join(map(at_home, part)) for part in parts])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if (now := REPLACED.get(args[0])) is not None:
            say_error(f"`fp8rl {args[0]}` is now `fp8rl {now}`; the next release drops the old name")
            args = [*now.split(), *args[1:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Also: certify (test an engine or a dump), warm (compile kernels ahead), study (claims about FP8).",
)

COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Run": (init, runs.train, runs.demo, runs.submit, runs.report, runs.runs),
    "Before a run": (diagnosis.doctor, diagnosis.plan),
    "After a run": (diagnosis.explain, models.eval, models.serve, models.convert),
}
"""The commands, by the heading under which `--help` lists them."""
BESIDE: tuple[Callable[..., None], ...] = (certify, diagnosis.warm, runs.study)
"""Rarely used commands. `--help` names them in its last line."""

for heading, commands in COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=heading)(command)
for command in BESIDE:
    app.command(hidden=True)(command)


def _version(asked: bool) -> None:
    if asked:
        print(f"fp8rl {fp8rl.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """FP8 reinforcement learning for Mixture-of-Experts models: one quantization spec for training and rollout."""


def main() -> None:
    """Run the command that the arguments name."""
    if sys.argv[1:] and sys.argv[1] in _SUPERVISED:
        supervise()
    end_on_signal()
    reach_loopback()
    for stream in (sys.stdout, sys.stderr):  # a name of a file may hold what the terminal's encoding does not
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        late = threading.Timer(_EXIT_SECONDS, os._exit, [code])  # a thread that a user's function has left holds it up
        late.daemon = True
        late.start()
        raise
