"""The checks of a live pair, on findings made by hand."""

import dataclasses
import math

import pytest
import torch

from fp8rl.diagnose.doctor import pair
from fp8rl.diagnose.doctor.logprobs import NATIVE_LIMIT, judged, noise_floor, trainer_against_engine
from fp8rl.diagnose.doctor.pair import Pair
from fp8rl.diagnose.measure import difference
from fp8rl.diagnose.report import Difference, Finding
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment import load_experiment
from fp8rl.rollout.types import HandshakeError
from tests.support.experiments import experiment

EXACT = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
NATIVE = dataclasses.replace(EXACT, mode="native")


def made(mean: float | None, **changes: float | None) -> Difference:
    return dataclasses.replace(
        Difference(tokens=100, nonfinite=0, mean=mean, p99=mean, max=mean, exact_frac=float(mean == 0)), **changes
    )


def passed(check: Finding) -> bool:
    return check.grade == "ok"


def test_both_sides_run_one_precision() -> None:
    for trainer, rollout, ok in (("fp8_forward", "fp8", True), ("bf16", "bf16", True), ("bf16", "fp8", False)):
        check = pair.same_precision(experiment(numerics={"trainer": trainer, "rollout": rollout}))
        assert (check.grade == "ok") is ok and (ok or "numerics.trainer=fp8 numerics.rollout=fp8" in check.remedy)


def test_a_difference_is_over_the_masked_tokens() -> None:
    first = torch.tensor([[0.0, -1.0, -2.0, -9.0], [0.0, -1.5, math.nan, -7.0]])
    second = torch.tensor([[0.0, -1.0, -2.5, -1.0], [0.0, -1.25, -1.0, -1.0]])
    mask = torch.tensor([[False, True, True, False], [False, True, True, False]])
    d = difference(first, second, mask)
    assert (d.tokens, d.nonfinite, d.max) == (3, 1, 0.5)
    assert d.mean == pytest.approx(0.25) and d.exact_frac == pytest.approx(1 / 3) and not d.zero
    assert difference(first, first, mask & ~first.isnan()).zero


@pytest.mark.parametrize(
    ("numerics", "measured", "bf16", "ok"),
    [
        (EXACT, made(0.0), None, True), (EXACT, made(1e-9), made(1.0), False),
        (EXACT, made(0.0, nonfinite=1), None, False), (EXACT, made(None, tokens=0, exact_frac=None), None, False),
        (NATIVE, made(0.01 * NATIVE_LIMIT * 0.99), made(0.01), True), (NATIVE, made(9.0), None, True),
        (NATIVE, made(0.01 * NATIVE_LIMIT * 1.01), made(0.01), False), (NATIVE, made(0.0, nonfinite=1), None, False),
    ],
)  # fmt: skip
def test_exact_mode_asks_for_zero_and_native_mode_is_bound_by_the_bf16_floor(numerics, measured, bf16, ok) -> None:
    found = trainer_against_engine(numerics, measured, bf16)
    assert passed(found) is ok and "fp8rl explain" in found.remedy
    mixed = trainer_against_engine(dataclasses.replace(numerics, trainer="bf16"), measured, bf16)
    assert "numerics.trainer=fp8" in mixed.remedy
    assert [passed(*noise_floor(mode, {"": made(1e-6)})) for mode in ("exact", "native")] == [False, True]


def test_a_verdict_says_which_agreement_holds() -> None:
    found = Pair([judged("spec", "one", True, "found 1", "no 1"), judged("bytes", "two", False, "a", "b", "Do c.")])
    said = "same spec holds, same bytes does not hold, same logprobs was not reached, formats were not reached"
    assert found.verdict == f"{said}, in 0 s"


def test_zero_is_written_as_zero_and_nothing_else_is() -> None:
    assert str(made(0.0)) == "|d| mean 0, p99 0, max 0, exact 1 on 100 tokens" and "mean 1.00e-09" in str(made(1e-9))


def test_an_engine_that_is_refused_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise HandshakeError("kv_cache_dtype: found 'float8_e4m3fn', expected 'bfloat16'")

    monkeypatch.setattr(pair, "open_pair", refused)
    *_, found = pair.compare(load_experiment("examples/arithmetic.yaml"), say=lambda text: None).findings
    assert found.key == "same spec, handshake" and "kv_cache_dtype: found 'float8_e4m3fn'" in found.found
