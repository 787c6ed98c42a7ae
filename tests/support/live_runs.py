"""Runs in the test's own process: what their directory holds, without the start of a command."""

from pathlib import Path

from fp8rl.rl.experiment import Experiment, load_experiment
from fp8rl.rl.loop import train
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.run.ending import finish
from fp8rl.rl.run.run import open_run
from tests.support.paths import EXAMPLES


def prepared(folder: Path, *settings: str, example: str = "arithmetic", name: str = "run") -> tuple[Experiment, RunDir]:
    """The experiment of an example with these settings, and the directory of its run, where it is written."""
    where = [f"run.dir={folder}", f"run.name={name}"]
    experiment, run = load_experiment(EXAMPLES / f"{example}.yaml", [*where, *settings]), RunDir(folder / name)
    run.path.mkdir()
    run.experiment.write_text(experiment.to_yaml())
    return experiment, run


def finished(folder: Path, *settings: str, **options: str) -> RunDir:
    experiment, run = prepared(folder, *settings, **options)
    with open_run(experiment, run) as live:
        finish(live.record, train(live))
    return run
