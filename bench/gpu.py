"""`python -m bench.gpu`: build, check and time the GPU path in one call of at most eight minutes.

Writes gpu.json and prints a table. What a machine lacks (Megatron, TransformerEngine) is named in it, not guessed.
`--rehearse` runs every part at tiny sizes with the kernels interpreted, on a machine without a GPU: it checks the
script and that trainer and engine get the same bits, and reports no times.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.gpu_measure import Measured, Sizes, Stopwatch
from bench.measure import Result, table_of
from studies.harness.lab import in_own_process

BUDGET_S = 450
PARTS = ("exactness", "quantizers", "gemms", "grouped", "sync", "stack")
PACKAGES = ("torch", "triton", "megatron-core", "transformer_engine", "sglang")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, interpreted, without a GPU")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="directory of gpu.json")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"found {sorted(unknown)}, expected names out of {list(PARTS)}")
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("found no CUDA device, expected one. Try the script with --rehearse")
    report, failed = measure_all(options.parts or PARTS, options.rehearse, options.out / "gpu.json")
    _print(report)
    return 0 if not failed and all(result.passed for result in report.results) else 1


@dataclass
class Report:
    """What gpu.json says; `left_out` names what could not be measured, and why."""

    machine: dict[str, Any]
    seconds: int = 0
    results: list[Result] = field(default_factory=list)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, part: str, measured: Measured) -> None:
        self.results += measured.results
        self.rows[part] = measured.rows
        self.left_out |= measured.left_out

    def write(self, path: Path) -> None:
        results = [{**asdict(result), "passed": result.passed} for result in self.results]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**vars(self), "results": results}, indent=1) + "\n")


def measure(part: str, rehearse: bool) -> Measured:
    """One of PARTS, in this process. A rehearsal keeps only what is not a time."""
    if rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    from bench import gpu_kernels, gpu_stack, gpu_sync
    from numerics.backend.implementation import using

    run = {
        "exactness": gpu_stack.exactness,
        "quantizers": gpu_kernels.quantizers,
        "gemms": gpu_kernels.gemms,
        "grouped": gpu_kernels.grouped,
        "sync": gpu_sync.run,
        "stack": gpu_stack.train,
    }[part]
    with using("triton"), torch.no_grad():
        measured = run(Sizes.tiny() if rehearse else Sizes.real(), Stopwatch("cpu" if rehearse else "cuda"))
    if rehearse:
        measured.results = [result for result in measured.results if result.name.startswith("d == 0")]
        measured.rows = []
    return measured


def measure_all(
    parts: Sequence[str], rehearse: bool, path: Path, run: Callable[[str, bool], Measured] = measure
) -> tuple[Report, bool]:
    """`run` part by part into the report at `path`; whether any of them failed.

    Each part has a process of its own and is written when it ends: a kernel that breaks the CUDA context, or the end
    of a lease, costs that part and no other.
    """
    start, report, failed = time.monotonic(), Report(_machine(rehearse)), False
    for part in parts:
        spent = time.monotonic() - start
        if spent > BUDGET_S:
            report.left_out[part] = f"{spent:.0f} s of {BUDGET_S} s were spent before it"
        else:
            print(f"{spent:4.0f} s  {part}", file=sys.stderr, flush=True)
            try:
                report.add(part, in_own_process(run, part, rehearse))
            except Exception as error:
                traceback.print_exception(error)
                report.left_out[part], failed = f"it failed: {type(error).__name__}: {error}", True
        report.seconds = round(time.monotonic() - start)
        report.write(path)
    return report, failed


def _machine(rehearsal: bool) -> dict[str, Any]:
    found = {name: _version(name) for name in PACKAGES}
    machine: dict[str, Any] = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "versions": found}
    if rehearsal:
        return machine | {"device": "none: a rehearsal on the CPU"}
    properties = torch.cuda.get_device_properties(0)
    return machine | {
        "device": properties.name,
        "memory_gib": properties.total_memory >> 30,
        "cuda": torch.version.cuda,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _print(report: Report) -> None:
    if importlib.util.find_spec("rich") is None:  # a bare machine with a GPU
        for result in report.results:
            print(f"{result.name}: {result.value:.3g}{'' if result.passed else ' !'} (bar {result.bar:g})")
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(width=160)
    for part, lines in report.rows.items():
        if lines:
            table = Table(*lines[0], title=part)
            for line in lines:
                table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in line.values()))
            console.print(table)
    console.print(table_of(report.results))
    for what, why in report.left_out.items():
        console.print(f"left out: {what}: {why}")


if __name__ == "__main__":
    sys.exit(main())
