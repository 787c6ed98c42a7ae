"""The GPU benchmark, rehearsed: every part runs, and trainer and engine get the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu, gpu_stack
from bench.gpu_measure import Measured, Sizes, Stopwatch


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.gpu", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_jobs")
def test_a_rehearsal_runs_every_part_and_reports_no_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--rehearse", "--out", str(tmp_path)])
    assert gpu.main() == 0, capsys.readouterr()
    report = json.loads((tmp_path / "gpu.json").read_text())
    by_name = {result["name"].split(",")[0]: result for result in report["results"]}
    assert by_name.keys() == {
        "d == 0: trainer against engine ops",
        "d == 0: ops that are not row-invariant here",
        "d == 0: tensors that differ after the copy",
    }
    agreement = by_name["d == 0: trainer against engine ops"]
    assert agreement["value"] == 0 and agreement["parts"]["tokens"] == 29 and agreement["parts"]["mean logprob"] < -1
    assert not any(report["rows"].values()) and "without a GPU" not in capsys.readouterr().err
    assert report["rows"].keys() == set(gpu.PARTS)


def test_what_a_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("megatron", "mbridge"):
        monkeypatch.setitem(sys.modules, package, None)
    measured = gpu_stack.train(Sizes.tiny(), Stopwatch("cpu"))
    assert measured.left_out == {"training the stack": "not installed: megatron, mbridge"}
    assert measured.results == []


def two_break(part: str, rehearse: bool) -> Measured:
    if part == "gemms":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if part == "sync":
        os._exit(1)
    return Measured(rows=[{"part": part}])


def test_parts_for_which_no_time_is_left_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "BUDGET_S", -1)
    report, failed = gpu.measure_all(gpu.PARTS, True, tmp_path / "gpu.json", two_break)
    assert not failed and report.left_out.keys() == set(gpu.PARTS)
    assert json.loads((tmp_path / "gpu.json").read_text())["left_out"] == report.left_out


@pytest.mark.slow
@pytest.mark.usefixtures("warm_jobs")
def test_a_part_that_breaks_costs_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, failed = gpu.measure_all(["quantizers", "gemms", "sync", "grouped"], True, tmp_path / "gpu.json", two_break)
    assert failed and report.rows == {"quantizers": [{"part": "quantizers"}], "grouped": [{"part": "grouped"}]}
    assert report.left_out.keys() == {"gemms", "sync"} and "illegal memory access" in report.left_out["gemms"]
    assert "two_break" in capsys.readouterr().err, "where it broke"
    assert json.loads((tmp_path / "gpu.json").read_text())["left_out"] == report.left_out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so() -> None:
    run = bench()
    assert run.returncode == 2 and "found no CUDA device" in run.stderr


def test_an_unknown_part_is_refused() -> None:
    run = bench("--rehearse", "gemm")
    assert run.returncode == 2 and "found ['gemm'], expected names out of" in run.stderr
