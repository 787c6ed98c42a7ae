"""Studies of a live trainer, on a few answers: what has to be 0 is 0, and what is small is smaller."""

import math

import pytest
import torch

from lab.studies import gradient_direction, precision_cases
from lab.studies.failure_modes import facts
from lab.studies.harness.gradient import turned
from lab.studies.harness.lab import in_own_process
from lab.studies.harness.subjects import MODEL
from lab.studies.precision_cases import MIXED

pytestmark = pytest.mark.usefixtures("warm_jobs")


@pytest.mark.slow
def test_the_cases_on_a_sample() -> None:
    found = in_own_process(precision_cases._exact_snapshots, "M", MODEL, [0], 1)
    cases = {name.removeprefix("M exact: "): {m: values[0] for m, values in of.items()} for name, of in found.items()}
    assert cases["case 2"]["abs_d"] == cases["case 3"]["abs_d"] == [0.0] * 8, "the trainer has sampled them itself"
    assert cases["case 1"]["kl"] == [0.0] * 8 and min(cases["case 1"]["abs_d"]) > 0
    assert cases["case 2"]["kl"] == cases["case 3"]["kl"] and min(cases["case 3"]["kl"]) > 0
    assert sum(cases[MIXED]["abs_d"]) > sum(cases["case 1"]["abs_d"]) > 0


@pytest.mark.slow
def test_the_backward_turns_a_gradient_less_than_the_forward() -> None:
    found = {name: of["turned"] for name, of in in_own_process(gradient_direction._turned, 0, 2).items()}
    for loss in gradient_direction.LOSSES:
        assert 0 < found[f"{loss}: backward"] < 0.5 * found[f"{loss}: forward"] < found[f"{loss}: forward"] < 0.1
        assert found[f"{loss}: again"] == 0.0


def test_turning_is_the_angle() -> None:
    east, north = torch.tensor([2.0, 0.0]).double(), torch.tensor([0.0, 5.0]).double()
    assert turned([east], [north]) == pytest.approx(1.0)
    assert turned([east], [-east]) == pytest.approx(2.0)
    assert turned([east + 1e-9 * north], [east]) == pytest.approx((2.5e-9) ** 2 / 2)
    assert turned([east], [east]) == 0.0
    assert turned([east, north], [east, -north]) == pytest.approx(1 - (4 - 25) / 29)


def test_the_chapters_arithmetic_by_hand() -> None:
    known = facts()
    assert known["m"] == pytest.approx(0.9 * 1.1e-4 + 0.1 * 3.2e-4)
    assert known["grain below 1, bf16"] == 2.0**-8, "7 bits of mantissa are stored: 2^-8 below 1, 2^-7 above"
    assert known["headroom of 1e-7, bf16"] == pytest.approx(math.log10(1e-7 / 2.0**-9), abs=0.01)
    assert known["headroom of 1e-7, fp32"] == pytest.approx(math.log10(1e-7 / 2.0**-25), abs=0.01)
    assert known["moved in 10,000 steps, fp32"] == pytest.approx(10_000 * known["step"], rel=1e-3)
    assert known["updates landed, bf16"] == 0.0 and known["script: v"] == pytest.approx(9e-8)
