"""Studies of a live trainer, on a few answers: what has to be 0 is 0, and what is small is smaller."""

import pytest

from lab.studies import gradient_direction, precision_cases
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
