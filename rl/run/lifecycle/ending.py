"""The end of a run: its summary, its report, and where to look further."""

from __future__ import annotations

import dataclasses

from fp8rl.rl.record.events import read_events
from fp8rl.rl.record.metrics_log import read_metrics
from fp8rl.rl.record.wandb_run import leet
from fp8rl.rl.report.report import write_report
from fp8rl.rl.report.summary import summarize, verdict
from fp8rl.rl.run.lifecycle.force import bounded
from fp8rl.rl.run.lifecycle.stopping import STOPPED
from fp8rl.rl.run.run import LiveRun

_TRACKER_SECONDS = 300.0
"""Bound of all trackers to take the last rows; each is given up after a minute."""


def finish(run: LiveRun, stopped: str = "") -> None:
    """Wait for the last checkpoint, close the tracker, write the report and print what came of the run.

    stopped: why it ended before its last step, if it did.
    """
    run.checkpoints.wait()
    summary = summarize(read_metrics(run.files.metrics), read_events(run.files.events))
    values = {key: value for key, value in dataclasses.asdict(summary).items() if value is not None}
    with bounded("wandb, or a tracker beside it,", _TRACKER_SECONDS):
        run.tracker.finish(
            {f"summary/{key}": value for key, value in values.items()}, exit_code=STOPPED * bool(stopped)
        )
    run.end(stopped)
    report, _ = write_report(run.files.path)
    say = run.console.note
    say("")
    for line in verdict(summary)[: None if run.experiment.algorithm.samples else 1]:
        say(line, style="bold green" if summary.bitwise_equal else "bold")
    say(f"report   {report}")
    if stopped:
        say(f"stopped: {stopped}", style="bold red")
        say(f"resume   fp8rl train {run.files.experiment} --resume")
    else:
        if run.files.adapter.is_dir():
            say(f"adapter  {run.files.adapter}")
        if run.files.model.is_dir():
            say(f"model    {run.files.model}")
    if (summarized := leet(run.files, "inspect", "--summary")) is not None:
        say(f"wandb    {summarized}")
