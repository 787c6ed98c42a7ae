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
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

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
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

    from bench import gpu_kernels, gpu_stack, gpu_sync
    from bench.gpu_measure import Sizes, Stopwatch
    from numerics.dispatch import using

    sizes = Sizes.tiny() if options.rehearse else Sizes.real()
    watch = Stopwatch("cpu" if options.rehearse else "cuda")
    runs = {
        "exactness": gpu_stack.exactness,
        "quantizers": gpu_kernels.quantizers,
        "gemms": gpu_kernels.gemms,
        "grouped": gpu_kernels.grouped,
        "sync": gpu_sync.run,
        "stack": gpu_stack.train,
    }
    start, results, rows, left_out = time.monotonic(), [], {}, {}
    with using("triton"), torch.no_grad():
        for part in options.parts or PARTS:
            spent = time.monotonic() - start
            if spent > BUDGET_S:
                left_out[part] = f"{spent:.0f} s of {BUDGET_S} s were spent before it"
                continue
            print(f"{spent:4.0f} s  {part}", file=sys.stderr, flush=True)
            measured = runs[part](sizes, watch)
            results += measured.results
            rows[part] = measured.rows
            left_out |= measured.left_out
    if options.rehearse:  # its times mean nothing
        results, rows = [result for result in results if result.name.startswith("d == 0")], {}
    report = {
        "machine": _machine(options.rehearse),
        "seconds": round(time.monotonic() - start),
        "results": [{**asdict(result), "passed": result.passed} for result in results],
        "rows": rows,
        "left_out": left_out,
    }
    _write(options.out / "gpu.json", report)
    _print(results, rows, left_out)
    return 0 if all(result.passed for result in results) else 1


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


def _write(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def _print(results: list[Any], rows: dict[str, list[dict[str, Any]]], left_out: dict[str, str]) -> None:
    from bench.measure import table_of

    if importlib.util.find_spec("rich") is None:  # a bare machine with a GPU
        for result in results:
            print(f"{result.name}: {result.value:.3g}{'' if result.passed else ' !'} (bar {result.bar:g})")
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(width=160)
    for part, lines in rows.items():
        if lines:
            table = Table(*lines[0], title=part)
            for line in lines:
                table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in line.values()))
            console.print(table)
    console.print(table_of(results))
    for what, why in left_out.items():
        console.print(f"left out: {what}: {why}")


if __name__ == "__main__":
    sys.exit(main())
