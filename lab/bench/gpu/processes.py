"""Each part in a process of its own, up to its limit; what it has measured by then is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil

from lab.bench.gpu import page
from lab.bench.gpu.journal import Journal, Report, read
from lab.bench.gpu.parts import Part

REHEARSED_SLOWER = 10
"""How many times its limit a part may take on a CPU."""
_FAMILY = "FP8RL_BENCH_PART"


def measure_all(parts: Sequence[Part], rehearse: bool, out: Path) -> Report:
    """Run the parts one by one; gpu.json and gpu.md in `out` are written after each."""
    journal, start = out / "gpu.jsonl", time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fp8rl-bench-") as scratch:
        for part in parts:
            print(f"{time.monotonic() - start:4.0f} s  {part.name}", file=sys.stderr, flush=True)
            _measure(part, rehearse, journal, scratch)
            report = read(journal)
            report.write(out / "gpu.json")
            page.write(report, out / "gpu.md")
    return report


def _measure(part: Part, rehearse: bool, journal: Path, scratch: str) -> None:
    mark, limit_s = uuid.uuid4().hex, part.limit_s * (REHEARSED_SLOWER if rehearse else 1)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", _FAMILY: mark}
    if rehearse:
        # Read before anything imports Triton; a GPU is left alone.
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    asked = json.dumps({"part": asdict(part), "rehearse": rehearse, "journal": str(journal), "scratch": scratch})
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "lab.bench.gpu.child", asked], env=environment, start_new_session=True
    )
    say = Journal(journal, part.name).say
    try:
        code = process.wait(limit_s)
        if code:
            say({"failed": f"its process ended with code {code}"})
    except subprocess.TimeoutExpired:
        say({"failed": f"it was ended at its limit of {limit_s} s"})
    finally:
        _end(process, mark)
    say({"seconds": round(time.monotonic() - began, 1)})


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill the part's process and whatever it has started, also what its parent has left behind."""
    if process.poll() is None:
        process.kill()
    for each in [each for each in psutil.process_iter() if _stems_from(each, mark)]:
        with suppress(psutil.NoSuchProcess):
            for child in each.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            each.kill()
    process.wait()


def _stems_from(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(_FAMILY) == mark
    except psutil.Error:
        return False
