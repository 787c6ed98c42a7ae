"""Runs that are killed at a random moment and go on: do they end in the bits of one that nobody touched?

Compared are metrics.jsonl but for times, every trajectory with both sides' log-probabilities, and the weights.
"""

from __future__ import annotations

import itertools
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8rl.rl.record.metrics_log import read_metrics
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.run.events import ENGINES_REPLACED
from fp8rl.rl.run.record import RESUMED
from lab.bench.measure import Result
from lab.bench.runs import timeless
from tests.support.cli_runs import SMALL, StartedRun, wait_until_gone

STEPS, SEED = 8, 0
SETTINGS = [*SMALL, f"run.steps={STEPS}", "eval.problems=0"]
MODES = {"synchronous": "rollout.staleness=0", "one step off": "rollout.staleness=1"}
VICTIMS = ("driver", "trainer", "engine", "everything", "everything")
"""Who is killed in the runs of each mode, in an order that is drawn."""
GONE_WITHIN_S = 60.0


def run() -> Iterator[Result]:
    draw = random.Random(SEED)
    for mode, setting in MODES.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            whole = StartedRun(folder, *SETTINGS, setting, name="whole")
            _complete(whole)
            pace = statistics.median(row["perf/step_seconds"] for row in whole.rows()[1:])
            for index, victim in enumerate(draw.sample(VICTIMS, len(VICTIMS))):
                path = folder / f"killed-{index}"
                moment = draw.uniform(0, STEPS - 1)
                parts = _killed(path, [*SETTINGS, setting], victim, moment, pace)
                yield Result(
                    name=f"bits as without: {mode}, SIGKILL of {'the ' * (victim != 'everything')}{victim}",
                    value=float(_bits(path) == _bits(whole.path)),
                    bar=1.0,
                    at_least=True,
                    parts={"steps into the run": moment, **parts},
                )


def _killed(path: Path, settings: list[str], victim: str, moment: float, pace: float) -> dict[str, float]:
    """Let a run go on to its end after a SIGKILL `moment` steps of `pace` seconds after its first sync.

    Gives the seconds from there to the next step, and how many steps were done again.
    """
    run = StartedRun(path.parent, *settings, name=path.name)
    run.wait_for(f"step {int(moment)}/{STEPS}")
    time.sleep(moment % 1 * pace)
    done, shown = read_metrics(path / "metrics.jsonl")[-1]["step"], len(_steps(run))
    trainer = [process for process in run.family() if "TrainerActor" in " ".join(process.cmdline())]
    began = time.monotonic()
    if victim in ("trainer", "engine"):  # the run goes on by itself
        (run.engine() if victim == "engine" else trainer[0]).kill()
        run.wait_until(lambda: len(_steps(run)) > shown, "another step")
    else:
        gone = [*trainer, run.engine()] if victim == "driver" else []
        run.process.kill()
        left = wait_until_gone(gone, GONE_WITHIN_S)
        assert not left, f"{left} outlive their driver"
        run.destroy()
        begun = bool(RunDir(path).checkpoint_steps())
        run = StartedRun(path.parent, *settings, "--resume" if begun else "--overwrite", name=path.name)
        run.wait_until(lambda: _steps(run), "a step")
    again = done + 1 - _steps(run)[shown if victim in ("trainer", "engine") else 0]
    seconds = time.monotonic() - began
    _complete(run)
    return {"seconds to the next step": seconds, "steps again": float(again)}


def _complete(run: StartedRun) -> None:
    code = run.ends()
    said = run.console()
    run.destroy()
    assert code == 0, said


def _steps(run: StartedRun) -> list[int]:
    """Those that the console has shown, in order."""
    return [int(step) for step in re.findall(rf"step +(\d+)/{STEPS}\b", run.console())]


def _bits(path: Path) -> list[Any]:
    """Everything that a run leaves, but for times and for what was mended."""
    files = RunDir(path)
    rows = [timeless(row) for row in read_metrics(files.metrics)]
    rows = [{name: x for name, x in row.items() if name not in (RESUMED, ENGINES_REPLACED)} for row in rows]
    rollouts = [files.rollouts(step).read_bytes() for step in files.rollout_steps()]
    tensors = itertools.chain(files.model.glob("*.safetensors"), (files.checkpoint(STEPS) / "state").glob("*.distcp"))
    return [rows, rollouts, {file.name: file.read_bytes() for file in tensors}]
