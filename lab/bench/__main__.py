"""`make bench`: all benchmarks, side by side, into a table and, if none fails, lab/bench/results.json.

Results are written to lab/bench/rows.jsonl as soon as they are measured.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from lab.bench.journal import read
from lab.bench.measure import table_of
from lab.bench.runner import Job, measure_all
from lab.studies.harness.result import processor

BENCHMARKS: dict[str, tuple[str, ...]] = {
    "rollout": ("lab.bench.engines:rollout",),
    "endpoint": ("lab.bench.endpoint:run",),
    "kv": ("lab.bench.engines:kv",),
    "families": ("lab.bench.engines:families",),
    "native": ("lab.bench.native:run",),
    "train": ("lab.bench.trainers:train",),
    "skipped": ("lab.bench.trainers:skipped",),
    "launches": ("lab.bench.launches:run",),
    "sync": ("lab.bench.sync:run", "lab.bench.sync:host"),
    "canary": ("lab.bench.blocks:canary",),
    "churn": ("lab.bench.sync:churn",),
    "checkpoint": ("lab.bench.checkpoint:run",),
    "loop": ("lab.bench.runs:loop.results",),
    "functions": ("lab.bench.runs:functions.results",),
    "scaling": ("lab.bench.blocks:scaling",),
    "memory": ("lab.bench.memory:run",),
    "base": ("lab.bench.base:run",),
    "adapters": ("lab.bench.adapters:run",),
    "packing": ("lab.bench.trainers:packing",),
    "trees": ("lab.bench.trees:run", "lab.bench.runs:shared.results"),
    "agreement": ("lab.bench.runs:agreement.results",),
    "layouts": ("lab.bench.runs:layouts.results",),
    "linear": ("lab.bench.runs:linear.results",),
    "algorithms": ("lab.bench.runs:algorithms.results",),
    "architectures": ("lab.bench.runs:architectures.results",),
    "float64": ("lab.bench.float64:run",),
    "asynchrony": ("lab.bench.blocks:steps_per_hour", "lab.bench.runs:asynchrony.results"),
    "kills": ("lab.bench.faults.kills:run",),
    "long": ("lab.bench.long:run",),
}
"""What yields the results of each."""
PRETRAINED = {"rounded": ("lab.bench.rounded:run",), "real": ("lab.bench.real:rollout", "lab.bench.real:train")}
"""Those of the model that `examples/smollm2.py` makes, which are run by name only."""
RESULTS = Path("lab/bench/results.json")
ROWS = Path("lab/bench/rows.jsonl")
"""The journal of this call."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help=f"of {', '.join(BENCHMARKS)}, which are the default, {', '.join(PRETRAINED)}"
    )
    names = parser.parse_args().names or list(BENCHMARKS)
    known = BENCHMARKS | PRETRAINED
    if unknown := set(names) - known.keys():
        parser.error(f"found {sorted(unknown)}, expected names out of {list(known)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the one that runs is ended, too
    ROWS.write_text("")
    measure_all([Job(name, "lab.bench.runner:yielded", {"calls": known[name]}) for name in names], ROWS)
    report = read(ROWS)
    machine = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        **{p: importlib.metadata.version(p) for p in ("torch", "sglang", "megatron-core")},
    }
    if names == list(BENCHMARKS) and not report.failed:
        data = {"machine": machine, "results": [{**asdict(r), "passed": r.passed} for r in report.results]}
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    Console().print(table_of(report.results))
    if report.failed:
        failed = f"failed: {', '.join(report.failed)}; what was measured before is above, and in {ROWS}"
        Console(stderr=True).print(failed)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
