"""`make bench`: all benchmarks, side by side, into a table and, if none fails, lab/bench/results.json."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import traceback
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from lab.bench.measure import read_rows, run_benchmark, table_of
from lab.studies.harness.lab import in_own_process
from lab.studies.harness.provenance import processor

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
RESULTS = Path("lab/bench/results.json")
ROWS = Path("lab/bench/rows.jsonl")
"""What this run of `make bench` has measured so far."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.bench", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; all by default")
    names = parser.parse_args().names or list(BENCHMARKS)
    unknown = set(names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"found {sorted(unknown)}, expected names out of {list(BENCHMARKS)}")
    console, failed = Console(stderr=True), []
    ROWS.write_text("")
    for name in names:
        console.print(f"measuring {name} ...")
        try:  # Megatron's process groups and torch's settings are global
            in_own_process(run_benchmark, name, ROWS)
        except Exception:  # of one benchmark; what it and the others measure is kept
            failed.append(name)
            traceback.print_exc()
    results = read_rows(ROWS)
    machine = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        **{p: importlib.metadata.version(p) for p in ("torch", "sglang", "megatron-core")},
    }
    if names == list(BENCHMARKS) and not failed:
        data = {"machine": machine, "results": [{**asdict(r), "passed": r.passed} for r in results]}
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    Console().print(table_of(results))
    if failed:
        console.print(f"failed: {', '.join(failed)}; what was measured before is above, and in {ROWS}")
    return 0 if not failed and all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
