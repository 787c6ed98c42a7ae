"""The GPU benchmark, rehearsed: every part runs, and trainer and engine get the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.gpu", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_a_rehearsal_runs_every_part_and_reports_no_times(tmp_path: Path) -> None:
    run = bench("--rehearse", "--out", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    by_name = {result["name"].split(",")[0]: result for result in report["results"]}
    assert by_name.keys() == {
        "d == 0: trainer against engine ops",
        "d == 0: ops that are not row-invariant here",
        "d == 0: tensors that differ after the copy",
    }
    agreement = by_name["d == 0: trainer against engine ops"]
    assert agreement["value"] == 0 and agreement["parts"]["tokens"] == 29 and agreement["parts"]["mean logprob"] < -1
    assert report["rows"] == {} and "without a GPU" not in run.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so() -> None:
    run = bench()
    assert run.returncode == 2 and "found no CUDA device" in run.stderr


def test_an_unknown_part_is_refused() -> None:
    run = bench("--rehearse", "gemm")
    assert run.returncode == 2 and "found ['gemm'], expected names out of" in run.stderr
