"""Advice follows the verdicts: without one there is none."""

import pytest

from studies.harness.advice import Choice, Point, advise
from studies.harness.catalogue import CATALOGUE
from studies.harness.choices import CHOICES
from studies.harness.findings import PLAN, Finding, Outcome
from studies.harness.names import load

POINTS = [point for choice in CHOICES for point in choice.points]
KEEP = Point("failure_modes", ("a",), {"confirmed": "Keep: {found}.", "contradicted": "Drop: {found}."})
BOTH = Point("gemm_error", ("b", "c"), {"confirmed": "Both: {found}.", "contradicted": "Neither: {found}."})
CHOICE = Choice("masters", (KEEP, BOTH))


def found(source: str, id: str, outcome: Outcome, figure: str = "+1") -> Finding:
    return Finding(source, id, f"{id} is so.", figure, "", outcome)


@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point.source}: {', '.join(point.ids)}")
def test_every_verdict_that_a_claim_may_have_has_its_sentence(point: Point) -> None:
    if point.source == PLAN:
        assert {claim.id for claim in CATALOGUE if PLAN in claim.by} >= {*point.ids}
        expected = {"confirmed", "contradicted"}
    else:
        claims = [claim for claim in load(point.source).claims if claim.id in point.ids]
        assert len(claims) == len(point.ids)
        expected = {"confirmed", "contradicted"}
        if any(claim.rule != "within" and claim.margin and not claim.control for claim in claims):
            expected.add("equivalent")
    assert point.advice.keys() == expected
    for sentence in point.advice.values():
        assert sentence.format(found="") != sentence or "{" not in sentence


def test_advice_is_the_verdicts() -> None:
    confirmed = advise(CHOICE, [found("failure_modes", "a", "confirmed", "+0.3")])
    assert confirmed.sentences == ["Keep: +0.3. ([failure_modes](#failure_modes): a confirmed)"]
    assert confirmed.missing == ["gemm_error"]
    contradicted = advise(CHOICE, [found("failure_modes", "a", "contradicted", "-0.3")])
    assert contradicted.sentences == ["Drop: -0.3. ([failure_modes](#failure_modes): a contradicted)"]


@pytest.mark.parametrize("outcome", ["undecided", "withheld", "waits for a GPU"])
def test_without_a_verdict_nothing_is_advised(outcome: Outcome) -> None:
    (sentence,) = advise(CHOICE, [found("failure_modes", "a", outcome)]).sentences
    assert sentence == (
        f"No advice, as there is no verdict: “a is so.” Found: +1. ([failure_modes](#failure_modes): a {outcome})"
    )


def test_several_claims_have_to_agree() -> None:
    b, c = (found("gemm_error", id, "confirmed", figure) for id, figure in (("b", "×1"), ("c", "×2")))
    (agreed,) = advise(CHOICE, [b, c]).sentences
    assert agreed == "Both: ×1 and ×2. ([gemm_error](#gemm_error): b confirmed, c confirmed)"
    (divided,) = advise(CHOICE, [b, found("gemm_error", "c", "contradicted")]).sentences
    assert divided.startswith("No advice, as the evidence is divided. “b is so.” “c is so.”")
    assert advise(CHOICE, [b]).sentences == [] and "gemm_error" in advise(CHOICE, [b]).missing
    assert advise(CHOICE, []).missing == ["failure_modes", "gemm_error"]
