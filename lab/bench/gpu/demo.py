"""`fp8rl demo` with few steps, as a user starts it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from fp8rl.rl.record.metrics_log import read_metrics
from lab.bench.agreement import exact_steps
from lab.bench.gpu.measure import Measured, Sizes, Stopwatch

LAST_LINES = 12
SMALL = ("rollout.prompts_per_step=4", "rollout.group_size=2", "eval.problems=8")
"""What makes the steps of a rehearsal short."""
COLUMNS = {
    "reward": "rollout/reward_mean",
    "largest |d|": "mismatch/train_rollout_logprob_abs_diff_max",
    "tokens": "mismatch/tokens",
}
TIMES = {"step (s)": "perf/step_seconds", "rollout (s)": "perf/rollout_seconds", "train (s)": "perf/train_seconds"}


def run(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", "from fp8rl.cli import main; main()", "demo"]
        settings = [f"run.dir={folder}", f"run.steps={sizes.demo}", "tracking.wandb.mode=disabled"]
        settings += SMALL if watch.device.type == "cpu" else ()
        told = subprocess.run([*command, *settings], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(told.stdout, file=sys.stderr)
        after_steps = told.stdout.rpartition("\nstep ")[2].splitlines()[1:]  # what steps say stands in the metrics
        for line in after_steps[-LAST_LINES:]:
            if line.strip() and folder not in line:
                done.row({"it said": line.strip()})
        if told.returncode:
            raise RuntimeError(f"fp8rl demo: found exit code {told.returncode}, expected 0")
        rows = read_metrics(Path(folder) / "demo" / "metrics.jsonl")
    for row in rows:
        what = {"step": row["step"], **{name: row[key] for name, key in COLUMNS.items() if key in row}}
        done.row(what, {name: row[key] for name, key in TIMES.items() if key in row})
    done.result(exact_steps(f"the demo, {sizes.demo} steps", rows), of_times=False)
