"""Verdicts of hand-made measurements."""

import dataclasses
from typing import Any

import pytest

from lab.studies.harness.claims import Claim, digest, judge
from lab.studies.harness.page import verdict_of

NEGATIVE = Claim(
    id="twice",
    says="",
    metric="m",
    arm="a again",
    against="a",
    contrast="difference",
    rule="within",
    bounds=(0.0, 0.0),
    control="negative",
)
POSITIVE = Claim(
    id="harm",
    says="",
    metric="m",
    arm="bad",
    against="a",
    contrast="ratio",
    rule="above",
    bounds=(2.0,),
    control="positive",
)
MEASURED = {
    "a": {"m": [1.0, 1.1, 0.9]},
    "a again": {"m": [1.0, 1.1, 0.9]},
    "bad": {"m": [9.0, 10.0, 8.5]},
    "b": {"m": [1.5, 1.61, 1.4]},
    "nearly a": {"m": [1.001, 1.1015, 0.901]},
    "wild": {"m": [0.2, 3.0, 1.4]},
}


def claim(arm: str, rule: Any = "above", bounds: tuple[float, ...] = (1.0,), **more: Any) -> Claim:
    settings = {"against": "a", "contrast": "ratio", **more}
    return Claim(id=f"{arm} {rule}", says="", metric="m", arm=arm, rule=rule, bounds=bounds, **settings)


def verdict(one: Claim, measured: Any = MEASURED, full: bool = True) -> str:
    return judge([NEGATIVE, POSITIVE, one], measured, full=full)[2].verdict


def test_a_direction_is_confirmed_contradicted_equivalent_or_undecided() -> None:
    assert verdict(claim("b")) == "confirmed"
    assert verdict(claim("b", "below")) == "contradicted"
    assert verdict(claim("nearly a", margin=0.05)) == "equivalent"
    assert verdict(claim("nearly a", "within", (0.95, 1.05))) == "confirmed"
    assert verdict(claim("b", "within", (0.95, 1.05))) == "contradicted"
    undecided = judge([NEGATIVE, POSITIVE, claim("wild")], MEASURED, full=True)[2]
    assert undecided.verdict == "undecided"
    assert undecided.visible == pytest.approx((undecided.found.high - undecided.found.low) / 2)


def test_a_quick_run_has_no_verdicts_and_may_leave_arms_out() -> None:
    found = judge([NEGATIVE, POSITIVE, claim("b"), claim("absent")], MEASURED, full=False)
    assert [one.verdict for one in found] == ["confirmed", "confirmed", "withheld"] and found[2].why == "a quick run"
    with pytest.raises(KeyError):
        judge([claim("absent")], MEASURED, full=True)


def test_a_quick_run_may_be_too_short_to_find_the_harm() -> None:
    wild, none = MEASURED["wild"], {"m": [1.0, 1.1, 0.9001]}

    def said(arm: str, values: dict[str, list[float]], full: bool) -> list[str]:
        found = judge([NEGATIVE, POSITIVE, claim("b")], {**MEASURED, arm: values}, full=full)
        return [verdict_of(control).partition(": ")[2] for control in found[:2]]

    assert said("bad", wild, full=False) == ["holds", "undecided in a quick run"]
    assert said("bad", wild, full=True) == ["holds", "FAILS"]
    assert said("bad", none, full=False) == ["holds", "FAILS"]
    assert said("a again", wild, full=False) == ["FAILS", "holds"]


@pytest.mark.parametrize("arm, name", [("a again", "twice"), ("bad", "harm")])
def test_a_control_that_fails_withholds_every_verdict(arm: str, name: str) -> None:
    broken = {**MEASURED, arm: {"m": [1.0, 1.1, 0.9001]}}
    found = judge([NEGATIVE, POSITIVE, claim("b")], broken, full=True)[2]
    assert found.verdict == "withheld" and found.why == f"controls that do not hold: {name}"


def test_many_claims_are_corrected_together() -> None:
    alone = judge([NEGATIVE, POSITIVE, claim("b")], MEASURED, full=True)[2]
    several = [claim("b"), *(dataclasses.replace(claim("wild"), id=str(n)) for n in range(40))]
    together = judge([NEGATIVE, POSITIVE, *several], MEASURED, full=True)[2]
    assert together.p == pytest.approx(41 * alone.p)


def test_a_changed_claim_has_another_digest() -> None:
    assert digest([claim("b")]) == digest([claim("b")]) != digest([claim("b", margin=0.1)])


def test_claims_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="found bounds"):
        claim("b", "within", (1.0,))
    with pytest.raises(ValueError, match="found contrast=ratio with against=None"):
        claim("b", against=None)
    with pytest.raises(ValueError, match="a different id for each"):
        judge([claim("b"), claim("b")], MEASURED, full=True)
