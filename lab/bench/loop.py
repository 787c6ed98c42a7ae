"""Costs in the demo's step: the loop itself, and the monitors with the verification of the sync."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fp8rl.rl.record.metrics_log import read_metrics
from lab.bench import sync
from lab.bench.measure import Result

STEPS, WARMUP = 14, 4
MODEL = Path("examples/models/tiny_qwen3_moe")


def run() -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        command = [Path(sys.executable).with_name("fp8rl"), "train", "examples/arithmetic.yaml"]
        overrides = [f"run.dir={folder}", "run.name=overhead", f"run.steps={STEPS}", "eval.every=0", "eval.problems=8"]
        subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL)
        rows = read_metrics(Path(folder) / "overhead" / "metrics.jsonl")
    plain = [
        r for r in rows if r["step"] > WARMUP and "perf/eval_seconds" not in r and "perf/checkpoint_seconds" not in r
    ]
    names = ("step", "rollout", "train", "monitor", "overhead")
    seconds = {name: statistics.median(r[f"perf/{name}_seconds"] for r in plain) for name in names}
    measured = sync.measure(MODEL)
    # Everything that a sync without proof leaves out; the refresh of what the engine computes with is counted too.
    verification = statistics.median(a - b for a, b in zip(measured.verified, measured.unverified, strict=True))
    parts = {f"{name} (s)": value for name, value in seconds.items()}
    return [
        Result(
            name="loop overhead / step (demo, steps without evaluation or checkpoint)",
            value=statistics.median(r["perf/overhead_seconds"] / r["perf/step_seconds"] for r in plain),
            bar=0.015,
            at_least=False,
            parts=parts | {"sync (s)": statistics.median(r["sync/seconds"] for r in plain)},
        ),
        Result(
            name="monitors and verification / step (the same steps)",
            value=(seconds["monitor"] + verification) / seconds["step"],
            bar=0.03,
            at_least=False,
            parts={"monitors (s)": seconds["monitor"], "verification (s)": verification, "step (s)": seconds["step"]},
        ),
    ]
