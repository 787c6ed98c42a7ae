"""Overhead of the loop in the demo: what of a step is neither rollout nor training nor sync."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.measure import Result
from rl.metrics_log import read_metrics

STEPS, WARMUP = 14, 4


def run() -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        command = [Path(sys.executable).with_name("fp8rl"), "train", "examples/arithmetic.yaml"]
        overrides = [f"run.dir={folder}", "run.name=overhead", f"run.steps={STEPS}", "eval.every=0", "eval.problems=8"]
        subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL)
        rows = read_metrics(Path(folder) / "overhead" / "metrics.jsonl")
    plain = [
        r for r in rows if r["step"] > WARMUP and "perf/eval_seconds" not in r and "perf/checkpoint_seconds" not in r
    ]
    names = ("step_seconds", "rollout_seconds", "train_seconds", "overhead_seconds")
    parts = {
        f"{name.removesuffix('_seconds')} (s)": statistics.median(r[f"perf/{name}"] for r in plain) for name in names
    }
    return [
        Result(
            name="loop overhead / step (demo, steps without evaluation or checkpoint)",
            value=statistics.median(r["perf/overhead_seconds"] / r["perf/step_seconds"] for r in plain),
            bar=0.05,
            at_least=False,
            parts=parts | {"sync (s)": statistics.median(r["sync/seconds"] for r in plain)},
        )
    ]
