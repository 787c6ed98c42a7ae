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
from pathlib import Path

import torch

from lab.bench.gpu import page
from lab.bench.gpu.parts import PARTS, WITHOUT_ENGINE
from lab.bench.gpu.processes import measure_all

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
    return 0 if not report.failed and all(result.passed for result in report.results) else 1


if __name__ == "__main__":
    sys.exit(main())
