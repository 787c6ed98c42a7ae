"""The end of a run: its summary, its report, and where to look further."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from pathlib import Path

from rl.guard.events import read_events
from rl.metrics_log import read_metrics
from rl.report import write_report
from rl.spec.sections import SftAlgorithm
from rl.stack import Stack
from rl.summary import summarize, verdict

STOPPED = 3
"""Exit code of a run that a gate, or a loss that is not finite, has stopped."""


def finish(stack: Stack, stopped: str = "") -> None:
    """Close the tracker with the summary, write the report and print what came of the run.

    stopped: why it ended before its last step, if it did.
    """
    summary = summarize(read_metrics(stack.run.metrics), read_events(stack.run.events))
    values = {key: value for key, value in dataclasses.asdict(summary).items() if value is not None}
    stack.tracker.finish(
        {f"summary/{key}": value for key, value in values.items()}, exit_code=STOPPED if stopped else 0
    )
    report = write_report(stack.run.path)
    say = stack.console.note
    say("")
    for line in verdict(summary)[: 1 if isinstance(stack.spec.algorithm, SftAlgorithm) else None]:
        say(line, style="bold green" if summary.bitwise_equal else "bold")
    say(f"report   {report}")
    if stopped:
        say(f"stopped: {stopped}", style="bold red")
        say(f"resume   fp8rl train {stack.run.spec} --resume")
    else:
        say(f"model    {stack.run.model}")
    offline = stack.run.path / "wandb" / "latest-run"
    if offline.exists():
        say(f"wandb    {_wandb()} leet inspect --summary {offline}")
        say(f"live     {_wandb()} leet {offline}    (in a second terminal, while a run goes on)")


def _wandb() -> str:
    """The command as this shell finds it: `make demo` runs in an environment that is not activated."""
    return "wandb" if shutil.which("wandb") else os.path.relpath(Path(sys.executable).with_name("wandb"))
