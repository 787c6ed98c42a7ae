"""`make bench`: all benchmarks, side by side, into bench/results.json and a table."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from bench.measure import Result, run_benchmark, table_of
from studies.harness.lab import in_own_process
from studies.harness.provenance import processor

BENCHMARKS = (
    *(
        "rollout",
        "speculation",
        "endpoint",
        "families",
        "native",
        "train",
        "skipped",
        "sync",
        "canary",
        "churn",
        "checkpoint",
        "loop",
        "functions",
        "scaling",
    ),
    *(
        "memory",
        "base",
        "adapters",
        "packing",
        "agreement",
        "layouts",
        "algorithms",
        "asynchrony",
        "kills",
        "long",
        "harness",
    ),
)
RESULTS = Path("bench/results.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; all by default")
    names = parser.parse_args().names or list(BENCHMARKS)
    unknown = set(names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"found {sorted(unknown)}, expected names out of {list(BENCHMARKS)}")
    results: list[Result] = []
    for name in names:
        Console(stderr=True).print(f"measuring {name} ...")
        # Megatron's process groups and torch's settings are global.
        results += in_own_process(run_benchmark, name)
    machine = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        **{p: importlib.metadata.version(p) for p in ("torch", "sglang", "megatron-core")},
    }
    if names == list(BENCHMARKS):
        data = {"machine": machine, "results": [{**asdict(r), "passed": r.passed} for r in results]}
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    Console().print(table_of(results))
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
