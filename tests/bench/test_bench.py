"""The command of the benchmarks."""

from __future__ import annotations

import subprocess
import sys


def test_an_unknown_benchmark_is_refused() -> None:
    run = subprocess.run([sys.executable, "-m", "bench", "rollouts"], capture_output=True, text=True, check=False)
    assert run.returncode == 2 and "found ['rollouts'], expected names out of" in run.stderr
