"""The 82 claims, each study's, the planner's and the audit's: none is left over, and none is claimed to be answered."""

from collections import Counter

import pytest

from lab.studies.document.findings import (
    AUDIT,
    CATALOGUE,
    PLAN,
    ClaimFinding,
    Listed,
    Outcome,
    findings,
    number_of,
    standings,
)
from lab.studies.document.published_map import answers as audit_answers
from lab.studies.harness.study import NAMES, load
from tests.support.paths import ROOT

BY_ID = {claim.id: claim for claim in CATALOGUE}


@pytest.fixture(scope="module")
def calculated() -> list[ClaimFinding]:
    return findings([], None)


def test_there_are_82_in_four_documents() -> None:
    assert len(BY_ID) == len(CATALOGUE) == 82
    assert Counter(claim.id[:3] for claim in CATALOGUE) == {"000": 14, "001": 9, "002": 29, "003": 30}
    for document, count in Counter(claim.id[:3] for claim in CATALOGUE).items():
        numbers = [claim.id for claim in CATALOGUE if claim.id.startswith(document)]
        assert numbers == [f"{document}-{number}" for number in range(1, count + 1)]


@pytest.mark.parametrize("name", NAMES)
def test_a_studys_claims_are_those_that_the_catalogue_expects_of_it(name: str) -> None:
    """Claims without a number are controls, or invariants of this project."""
    numbers = {number_of(claim.id) for claim in load(name).claims if not claim.control} - {None}
    assert numbers == {claim.id for claim in CATALOGUE if name in claim.by}


def test_the_planner_and_the_audit_answer_what_the_catalogue_expects_of_them(calculated: list[ClaimFinding]) -> None:
    assert {one.id for one in calculated} == {claim.id for claim in CATALOGUE if PLAN in claim.by}
    assert {one.id for one in audit_answers({})} == {claim.id for claim in CATALOGUE if AUDIT in claim.by}


@pytest.mark.parametrize("claim", CATALOGUE, ids=lambda claim: claim.id)
def test_every_claim_is_answered_somewhere_or_says_why_it_waits(claim: Listed) -> None:
    assert claim.by or claim.shown or claim.waits
    assert {*claim.by} <= {*NAMES, PLAN, AUDIT}
    if claim.shown:
        assert (ROOT / claim.shown.by).is_file() and claim.shown.outcome in ("confirmed", "contradicted")


def found(source: str, id: str, outcome: Outcome, why: str = "") -> ClaimFinding:
    return ClaimFinding(source, id, "", "", "", outcome, why)


def test_a_claims_verdicts_by_hand() -> None:
    """003-23 has five claims of one study, 002-17 three sources."""
    made: list[ClaimFinding] = [
        *(found("gemm_error", f"003-23{letter}", "confirmed") for letter in "abe"),
        *(found("gemm_error", f"003-23{letter}", "contradicted") for letter in "cd"),
        found("plan", "002-17", "contradicted", "its own report"),
        *(found("failure_modes", f"002-17{letter}", "undecided") for letter in "ab"),
        found("gemm_error", "003-2", "confirmed"),
    ]
    said = {one.claim.id: one for one in standings(made)}
    assert len(said) == 82
    assert said["003-23"].verdict == (
        "**confirmed** (a, b, e), **contradicted** (c, d); waiting for a GPU: the two libraries themselves"
    )
    assert said["003-23"].where == "[gemm_error](#gemm_error)"
    assert said["002-17"].verdict == (
        "**contradicted**: its own report (plan); no audit is kept yet; undecided (all 2) (failure_modes)"
    )
    pages = "[plan](../../docs/plan.md), [audit](../../docs/exactness.md)"
    assert said["002-17"].where == f"{pages}, [failure_modes](#failure_modes)"
    assert said["003-2"].verdict.startswith("`fp8rl study model_scale` has no kept result yet; waiting for a GPU")
    assert said["003-3"].verdict.startswith("waiting for a GPU: ")
