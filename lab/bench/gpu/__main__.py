"""Build, check and time the GPU path: `python -m lab.bench.gpu evidence` for all of it, in at most 30 minutes.

Without a word it runs the parts that start no engine, in ten minutes at most; named parts run alone. What is found
stands in gpu.json, and in gpu.md for a reader, under --out; what was measured there before on the same machine and is
not measured again stays. What a machine lacks (Megatron, SGLang) is named, not guessed.

`--rehearse` runs the same code at tiny sizes on a CPU, with the kernels interpreted. It checks the script, and that
trainer and engine get the same bits; it reports no times.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from lab.bench import runner
from lab.bench.gpu import page
from lab.bench.gpu.parts import PARTS, WITHOUT_ENGINE, Part
from lab.bench.journal import Report, read

EVIDENCE = "evidence"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.bench.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"{EVIDENCE} (all), or of {', '.join(PARTS)}")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, interpreted, without a GPU")
    parser.add_argument("--out", type=Path, default=Path("lab/bench"), help="directory of gpu.json and gpu.md")
    options = parser.parse_args()
    unknown = set(options.parts) - {*PARTS, EVIDENCE}
    if unknown:
        parser.error(f"found {sorted(unknown)}, expected {EVIDENCE!r} or names out of {list(PARTS)}")
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("found no CUDA device, expected one. Try the script with --rehearse")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the part that runs is ended, too
    named = set(options.parts) - {EVIDENCE} or (PARTS if options.parts else WITHOUT_ENGINE)
    report = measure_all([part for name, part in PARTS.items() if name in named], options.rehearse, options.out)
    page.show(report)
    return 0 if report.passed else 1


def measure_all(parts: Sequence[Part], rehearse: bool, out: Path) -> Report:
    """Run the parts one by one; gpu.json and gpu.md in `out` are written after each."""
    journal = out / "gpu.jsonl"
    out.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        report = read(journal)
        report.write(out / "gpu.json")
        page.write(report, out / "gpu.md")

    with tempfile.TemporaryDirectory(prefix="fp8rl-bench-") as scratch:
        runner.measure_all([part.job(rehearse, scratch) for part in parts], journal, write)
    return read(journal)


if __name__ == "__main__":
    sys.exit(main())
