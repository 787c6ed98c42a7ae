"""`make bench`: all benchmarks, side by side, into bench/results.json and a table."""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.measure import Result, run_benchmark

BENCHMARKS = ("rollout", "train", "sync", "loop", "agreement")
RESULTS = Path("bench/results.json")


def main() -> int:
    names = sys.argv[1:] or list(BENCHMARKS)
    results: list[Result] = []
    for name in names:
        Console(stderr=True).print(f"measuring {name} ...")
        results += _in_own_process(name)
    machine = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        **{p: importlib.metadata.version(p) for p in ("torch", "sglang", "megatron-core")},
    }
    if names == list(BENCHMARKS):
        data = {"machine": machine, "results": [{**asdict(r), "passed": r.passed} for r in results]}
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    Console().print(_table(results))
    return 0 if all(result.passed for result in results) else 1


def _in_own_process(name: str) -> list[Result]:
    """Megatron's process groups and torch's settings are global, so each benchmark gets a process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_benchmark, name).result()


def _table(results: list[Result]) -> Table:
    table = Table("what", "found", "bar", "measurements")
    for result in results:
        bar = f"{'>=' if result.at_least else '<='} {result.bar:g}"
        parts = ", ".join(f"{name} {_number(value)}" for name, value in result.parts.items())
        table.add_row(result.name, f"{result.value:.3g}{'' if result.passed else ' !'}", bar, parts)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    sys.exit(main())
