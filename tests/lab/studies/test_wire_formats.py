"""The study of wire formats: its positive control, how it counts bytes, and its claims on numbers made up by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8rl.numerics.quantize import fake_quantize
from fp8rl.trainer.distributed.wires import SPECS
from lab.studies.harness.claims import judge
from lab.studies.wire_formats import ARMS, STUDY, UNSCALED, _Counted, unscaled


def test_unscaled_gradients_are_plain_fp8_numbers_and_only_within_the_block() -> None:
    x = torch.tensor([[2.0**-11, 1.03, 1000.0]])
    scaled = fake_quantize(x, SPECS["e4m3"])
    with pytest.raises(ZeroDivisionError), unscaled():
        assert fake_quantize(x, SPECS["e4m3"]).tolist() == [[0.0, 1.0, 448.0]]
        assert fake_quantize(x, SPECS["e5m2"])[0, 2] == pytest.approx(1000)
        raise ZeroDivisionError
    assert torch.equal(fake_quantize(x, SPECS["e4m3"]), scaled) and scaled[0, 2] == pytest.approx(1000)


def test_bytes_are_those_of_each_step() -> None:
    counted, traffic = _Counted(), SimpleNamespace(gradients=0, weights=0)
    trainer: Any = SimpleNamespace(optimizer=SimpleNamespace(traffic=traffic))
    for gradients, weights in ((10, 4), (10, 4), (7, 0)):
        traffic.gradients += gradients
        traffic.weights += weights
        counted(trainer)
    assert counted.noted == {"gradient_bytes": [10, 10, 7], "weight_bytes": [4, 4, 0]}


@pytest.mark.parametrize("lost", [0.0, 0.01])
def test_claims_are_about_arms_and_metrics_that_are_measured(lost: float) -> None:
    plain = {"nll": [0.1, 0.2, 0.15, 0.12, 0.13], "gradient_bytes": [1.0] * 5, "weight_bytes": [1.0] * 5}
    plain |= {"relative_error": [0.0] * 5, "turned": [0.0] * 5}
    values = {name: dict(plain) for name in ARMS}
    for name, wrong in (("gradients E4M3", 0.02), ("gradients E5M2", 0.04), ("gradients BF16", 0.002), (UNSCALED, 0.9)):
        values[name] |= {"relative_error": [wrong] * 5, "turned": [wrong**2 / 2] * 5, "gradient_bytes": [0.2578] * 5}
    values[UNSCALED]["nll"] = [nll + 0.1 for nll in plain["nll"]]
    values["gradients E4M3"]["nll"] = [nll + lost for nll in plain["nll"]]
    values["weights E4M3"]["weight_bytes"] = [0.52] * 5
    verdicts = {judged.claim.id: judged.verdict for judged in judge(STUDY.claims, values, full=True)}
    assert verdicts["002-26c"] == ("contradicted" if lost else "confirmed")
    assert verdicts["000-3"] == "contradicted"  # half as precise
    assert {verdicts[claim] for claim in ("no scales", "same arm twice", "002-26a", "000-9a", "000-9b")} == {
        "confirmed"
    }
