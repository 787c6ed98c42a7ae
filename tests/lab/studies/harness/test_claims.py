"""Verdicts of hand-made measurements."""

import dataclasses
from typing import Any

import pytest

from lab.studies.harness.claims import Claim, digest, judge
from lab.studies.harness.page import verdict_of

MEASURED = {
    "a": {"m": [1.0, 1.1, 0.9]},
    "a again": {"m": [1.0, 1.1, 0.9]},
    "bad": {"m": [9.0, 10.0, 8.5]},
    "b": {"m": [1.5, 1.61, 1.4]},
    "nearly a": {"m": [1.001, 1.1015, 0.901]},
    "wild": {"m": [0.2, 3.0, 1.4]},
}
WILD, NONE = MEASURED["wild"], {"m": [1.0, 1.1, 0.9001]}


def claim(arm: str, rule: Any = "above", bounds: tuple[float, ...] = (1.0,), **more: Any) -> Claim:
    settings = {"id": f"{arm} {rule}", "says": "", "metric": "m", "against": "a", "contrast": "ratio", **more}
    return Claim(arm=arm, rule=rule, bounds=bounds, **settings)


CONTROLS = [
    claim("a again", "within", (0.0, 0.0), id="twice", contrast="difference", control="negative"),
    claim("bad", "above", (2.0,), id="harm", control="positive"),
]


@pytest.mark.parametrize(
    ("one", "verdict"),
    [
        (claim("b"), "confirmed"),
        (claim("b", "below"), "contradicted"),
        (claim("nearly a", margin=0.05), "equivalent"),
        (claim("nearly a", "within", (0.95, 1.05)), "confirmed"),
        (claim("b", "within", (0.95, 1.05)), "contradicted"),
        (claim("wild"), "undecided"),
    ],
)
def test_a_direction_is_confirmed_contradicted_equivalent_or_undecided(one: Claim, verdict: str) -> None:
    found = judge([*CONTROLS, one], MEASURED, full=True)[2]
    assert found.verdict == verdict
    assert verdict != "undecided" or found.visible == pytest.approx((found.found.high - found.found.low) / 2)


def test_no_collapse_in_five_runs_says_nothing_of_a_tenth() -> None:
    measured = MEASURED | {"runs": {"collapsed": [0.0] * 5}}
    settings: Any = {"metric": "collapsed", "against": None, "contrast": "value"}
    ones = [claim("runs", "within", (0.0, 0.0), **settings), claim("runs", "above", (0.1,), **settings)]
    found = judge([*CONTROLS, *ones], measured, full=True)[2:]
    assert [one.verdict for one in found] == ["undecided"] * 2 and found[0].found.high == pytest.approx(0.522, abs=1e-3)


def test_a_quick_run_has_no_verdicts_and_may_leave_arms_out() -> None:
    found = judge([*CONTROLS, claim("b"), claim("absent")], MEASURED, full=False)
    assert [one.verdict for one in found] == ["confirmed", "confirmed", "withheld"] and found[2].why == "a quick run"
    with pytest.raises(KeyError):
        judge([claim("absent")], MEASURED, full=True)


@pytest.mark.parametrize(
    ("arm", "values", "full", "said"),
    [
        ("bad", WILD, False, ["holds", "undecided in a quick run"]),
        ("bad", WILD, True, ["holds", "FAILS"]),
        ("bad", NONE, False, ["holds", "FAILS"]),
        ("bad", NONE, True, ["holds", "FAILS"]),
        ("a again", WILD, False, ["FAILS", "holds"]),
        ("a again", NONE, True, ["FAILS", "holds"]),
    ],
)
def test_a_control_that_fails_withholds_every_verdict_and_a_quick_run_may_be_too_short(
    arm: str, values: Any, full: bool, said: list[str]
) -> None:
    found = judge([*CONTROLS, claim("b")], {**MEASURED, arm: values}, full=full)
    assert [verdict_of(control).partition(": ")[2] for control in found[:2]] == said
    failed = CONTROLS[said.index("FAILS")].id if full else ""
    assert found[2].verdict == "withheld" and (not full or found[2].why == f"controls that do not hold: {failed}")


def test_many_claims_are_corrected_together() -> None:
    alone = judge([*CONTROLS, claim("b")], MEASURED, full=True)[2]
    several = [claim("b"), *(dataclasses.replace(claim("wild"), id=str(n)) for n in range(40))]
    assert judge([*CONTROLS, *several], MEASURED, full=True)[2].p == pytest.approx(41 * alone.p)


def test_a_changed_claim_has_another_digest_and_one_that_contradicts_itself_is_refused() -> None:
    assert digest([claim("b")]) == digest([claim("b")]) != digest([claim("b", margin=0.1)])
    with pytest.raises(ValueError, match="found bounds"):
        claim("b", "within", (1.0,))
    with pytest.raises(ValueError, match="found contrast=ratio with against=None"):
        claim("b", against=None)
    with pytest.raises(ValueError, match="a different id for each"):
        judge([claim("b"), claim("b")], MEASURED, full=True)
