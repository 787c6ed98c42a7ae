"""The GPU bench, rehearsed: its parts that start no engine run, and what goes wrong in one costs no other."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.tiles import make_tiles
from lab.bench import runner
from lab.bench.gpu import bits, products, sync
from lab.bench.gpu.__main__ import main, measure_all
from lab.bench.gpu.fifteen.fat import only
from lab.bench.gpu.measure import Measured, Shape, Sizes, Stopwatch
from lab.bench.gpu.parts import PARTS, measure
from lab.bench.journal import Journal, Report, read
from lab.studies.harness.lab import in_own_process
from tests.support.gpu_parts import part
from tests.support.ranks import WARM
from tests.support.servers import wait_until

EQUAL = {
    "exactness": 1,
    "graph": 2,
    "vocabulary": 3,
    "trees": 2,
    "sync": 1,
    "transport": 1,
    "steps": 3,
    "candidates": 1,
}
EQUAL |= dict.fromkeys(("deepgemm", "bits", "launch", "quantizers", "gemms", "grouped", "stack"), 0)
"""In how many ways each part finds that both sides are equal."""
TRAINERS = ("steps", "stack")
EXPERTS = Shape("experts", 192, 384, 8, 1)


def rehearsed(name: str, folder: Path) -> Report:
    journal = Journal(folder / "gpu.jsonl", name)
    run = in_own_process if name in TRAINERS else lambda function, *given: function(*given)
    run(measure, journal.say, asdict(PARTS[name]), True, str(folder))
    return read(journal.path)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_jobs")
@pytest.mark.parametrize("name", EQUAL)
def test_a_part_runs_and_reports_no_times(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "multiprocessing", SimpleNamespace(Pipe=WARM.Pipe, get_context=lambda _: WARM))
    report = rehearsed(name, tmp_path)
    equal = [result for result in report.results if result.bar == 0]
    assert len(equal) == EQUAL[name] and not any(result.value for result in equal)
    assert all(count for result in equal for count in result.parts.values()), "nothing was compared"
    assert all(result.passed for result in report.results)
    assert report.rows[name] or report.left_out[name] or equal, "nothing came of it"
    if name == "graph":  # or one that keeps the weights of its capture would not be found out
        changed = report.results[-1].parts
        assert changed["logits that the change moved"] > 0.9 * changed["logits"]
    told = {column for row in report.rows[name] for column in row}
    assert not told & {"seconds", "tokens/s", "GB/s", "of copy", "FP8", "step", "graph (s)", "us", "DeepGEMM"}


@pytest.mark.slow
def test_another_product_than_ours_is_told_from_ours_by_its_bits(tmp_path: Path) -> None:
    def grouped(a: Any, b: Any, expert: torch.Tensor) -> torch.Tensor:
        return gemm(a, b, torch.bfloat16, tiles=make_tiles(torch.bincount(expert), len(expert)))

    for factor, different in ((1.0, False), (1.01, True)):
        done = Measured(tmp_path, lambda line: None)
        library = products.Library(lambda a, b, factor=factor: gemm(a, b, torch.bfloat16) * factor, grouped)
        products.compare(done, Sizes.tiny(), Stopwatch("cpu"), library)
        dense, experts = done.results
        assert (dense.value > 0) == different and experts.value == 0
        checked = [row for row in done.rows if "checked" in row]
        assert [row["numbers"] for row in checked] == [16 * 128, 3 * 128 * 128]


@pytest.mark.slow
@pytest.mark.parametrize("programs", [1, 3])
def test_specialised_warps_give_our_bits_whatever_the_shapes(
    tmp_path: Path, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of experts without rows, of tiles that are not full, and of programs that take several tiles."""
    monkeypatch.setattr("fp8rl.numerics.kernels.products.gemm.programs", lambda device: programs)
    sizes = replace(Sizes.tiny(), tokens=(1, 300), dense=(Shape("dense", 320, 1024),), experts=(EXPERTS,))
    done = Measured(tmp_path, lambda line: None)
    products.candidates(done, sizes, Stopwatch("cpu"))
    (result,) = done.results
    assert (result.value, result.parts["of"]) == (0, 301 * (320 + 1024 + 192) + 2 * (320 * 1024 + 8 * 192 * 384))


@pytest.mark.slow
def test_a_product_whose_rows_depend_on_their_number_is_told_from_one_that_is_ours(tmp_path: Path) -> None:
    def refuses_one(a: Any, b: Any) -> torch.Tensor:
        if len(a.data) == 1:
            raise RuntimeError("no kernel for one row")
        return gemm(a, b, torch.bfloat16) * (1.5 if len(a.data) < 5 else 1)

    done = Measured(tmp_path, lambda line: None)
    sizes = replace(Sizes.tiny(), multiplied=(5, 1, 2))
    bits.compare(done, sizes, Stopwatch("cpu"), {"same": lambda a, b: gemm(a, b, torch.bfloat16), "other": refuses_one})
    found = {(row["library"], row["rows"]): (row["not ours"], row["not as among most"]) for row in done.rows}
    assert found.pop(("other", 2)) > (0, 0)
    assert found == dict.fromkeys([("same", 5), ("same", 1), ("same", 2), ("other", 5)], (0, 0))
    assert done.left_out == {"other, 1 rows": "no kernel for one row"}


@pytest.mark.slow
def test_a_part_that_fails_dies_or_hangs_keeps_its_rows_and_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Patient(subprocess.Popen):  # type: ignore[type-arg]
        """Its limit has passed once the part hangs, however slow this machine is."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None or '"name": "hangs"' not in str(self.args):
                return super().wait(timeout)
            while '"sleeps"' not in (tmp_path / "gpu.jsonl").read_text():
                assert self.poll() is None
                time.sleep(0.05)
            raise subprocess.TimeoutExpired(self.args, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(runner.subprocess, "Popen", Patient)
        report = measure_all([part(name) for name in ("raises", "dies", "hangs")], True, tmp_path)
    assert report.failed == {
        "raises": "RuntimeError: CUDA error: an illegal memory access was encountered",
        "dies": "its process ended with code 9",
        "hangs": "it was ended at its limit of 900 s",
    }
    (row,) = report.rows.pop("hangs")
    assert report.rows == {name: [{"here": 1}] for name in ("raises", "dies")}
    assert "in raises" in capfd.readouterr().err, "where it broke"
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert (written["failed"], written["rows"]) == (report.failed, {**report.rows, "hangs": [row]})
    page = (tmp_path / "gpu.md").read_text()
    assert "did not come to its end: RuntimeError: CUDA error" in page and page.count("| here |") == 2

    def gone() -> bool:  # its end is sent before the report comes, and takes a moment
        pid = row["sleeps"]
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    assert wait_until(gone, 30), "what a part has started is ended, too"


def test_a_library_is_cut_to_the_code_of_one_architecture() -> None:
    """A fat binary of three entries between other bytes, and one without the architecture."""

    def entry(architecture: int, code: bytes) -> bytes:
        head = struct.pack("<HHIQ", 2, 0x101, 64, len(code)).ljust(28, b"-")
        return head + struct.pack("<I", architecture).ljust(36, b"-") + code

    def fat(*entries: bytes) -> bytes:
        body = b"".join(entries)
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body

    others, mine = (entry(80, b"old" * 9), entry(100, b"new" * 9)), entry(90, b"mine" * 5)
    library = b"head" + fat(others[0], mine, others[1]) + b"between" + fat(others[0]) + b"tail"
    cut = only(library, {90})
    kept = fat(mine).ljust(len(fat(others[0], mine, others[1])), b"\0")
    assert cut == b"head" + kept + b"between" + fat(others[0]) + b"tail" and len(cut) == len(library)


def test_an_unknown_part_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lab.bench.gpu", "--rehearse", "evidence", "gemm"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "found ['gemm'], expected 'evidence' or names out of" in capsys.readouterr().err
