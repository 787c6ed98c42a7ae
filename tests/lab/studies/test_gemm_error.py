"""The emulated accumulators against arithmetic by hand and float64, and a whole quick study."""

import json
from pathlib import Path

import pytest
import torch

from lab.studies.gemm_error import ARMS, errors_of
from lab.studies.harness.products import in_fp22, in_fp32, promoted
from lab.studies.harness.study import load
from lab.studies.run import run_study


def test_an_fp22_accumulator_loses_what_does_not_reach_its_13_bits() -> None:
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 32] = 1.0, 2.0**-13 + 2.0**-14  # the second instruction adds to 1: bits below 2^-13 are cut off
    assert in_fp22(x, torch.ones(1, 64)).item() == 1 + 2.0**-13
    assert in_fp32(x, torch.ones(1, 64)).item() == 1 + 2.0**-13 + 2.0**-14
    x[0, 32] = 2.0**-14
    assert in_fp22(x, torch.ones(1, 64)).item() == 1.0


def test_promotion_keeps_what_a_long_sum_loses() -> None:
    x, ones = torch.full((1, 4096), 1.001), torch.ones(1, 4096)
    exact = 4096 * float(x[0, 0])
    lost = [abs(product(x, ones).item() - exact) / exact for product in (in_fp32, promoted, in_fp22)]
    assert lost[0] < 1e-5 < lost[1] < 2e-4 < lost[2]


def test_both_operands_err_twice_as_much_as_one() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 256, generator=generator).bfloat16() for rows in (200, 300))
    both, weight = errors_of(ARMS["both operands"], x, w), errors_of(ARMS["weight alone"], x, w)
    assert both["calc_diff"] == pytest.approx(0.00068, rel=0.05)
    assert both["calc_diff"] / weight["calc_diff"] == pytest.approx(2, rel=0.1)
    # One of two vectors at an angle a has a calc_diff near a² / 2 and a relative error near a.
    assert both["relative_error"] ** 2 / 2 == pytest.approx(both["calc_diff"], rel=0.05)


@pytest.mark.slow
def test_a_quick_study_is_written_whole(tmp_path: Path) -> None:
    run_study(load("gemm_error"), quick=True, seeds=None, folder=tmp_path, say=lambda text: None)
    written = tmp_path / "gemm_error"
    files = {path.name for path in written.iterdir()}
    assert files == {"results.json", "table.md", "index.html", "gemm_error.svg", "accumulator.svg"}
    claims = json.loads((written / "results.json").read_text())["claims"]
    assert all(claim["verdict"] == "withheld" for claim in claims if not claim["control"])
    assert b"quick run: no verdicts" in (written / "gemm_error.svg").read_bytes()
