"""What a user's functions cost the step: a reward that waits, and an environment of several turns."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path

from fp8rl.rl.record.metrics_log import Row
from lab.bench.agreement import run_example
from lab.bench.measure import Result

STEPS, WARMUP = 12, 4
WAIT_S = 0.2


async def waits(answer: str) -> float:
    """A reward that asks nobody and waits as long as a service may take."""
    await asyncio.sleep(WAIT_S)
    return 0.0


def run() -> list[Result]:
    few = {"run.steps": STEPS, "eval.every": 0, "eval.problems": 8}
    waiting = "[{function: integer}, {function: lab.bench.functions:waits, weight: 0.0}]"
    with tempfile.TemporaryDirectory() as name:
        folder, spec = Path(name), Path("examples/arithmetic.yaml")
        plain = _steps(run_example(spec, folder, "plain", **few))
        slow = _steps(run_example(spec, folder, "waits", **few, rewards=waiting))
        game = _steps(run_example(Path("examples/guess.yaml"), folder, "guess", **few))
    return [
        Result(
            name=f"reward that waits {WAIT_S} s for each of 256 answers: its phase / step",
            value=statistics.median(row["perf/reward_seconds"] / row["perf/step_seconds"] for row in slow),
            bar=0.10,
            at_least=False,
            parts={
                "reward (s)": _median(slow, "reward"),
                "step (s)": _median(slow, "step"),
                "step without it (s)": _median(plain, "step"),
                "one after the other (s)": 256 * WAIT_S,
            },
        ),
        *(
            Result(
                name=f"loop overhead / step: {name}",
                value=statistics.median(row["perf/overhead_seconds"] / row["perf/step_seconds"] for row in rows),
                bar=0.05,
                at_least=False,
                parts={"overhead (s)": _median(rows, "overhead"), "step (s)": _median(rows, "step")},
            )
            for name, rows in {"a reward that waits": slow, "an environment of three turns": game}.items()
        ),
    ]


def _steps(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["step"] > WARMUP and "perf/checkpoint_seconds" not in row]


def _median(rows: list[Row], name: str) -> float:
    return statistics.median(row[f"perf/{name}_seconds"] for row in rows)
