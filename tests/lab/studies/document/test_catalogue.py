"""The 82 claims, each study's, the planner's and the audit's: none is left over, and none is claimed to be answered."""

from collections import Counter

from lab.studies.document.findings import AUDIT, CATALOGUE, PLAN, ClaimFinding, Outcome, findings, number_of, standings
from lab.studies.document.published_map import answers as audit_answers
from lab.studies.harness.study import NAMES, load
from tests.support.paths import ROOT


def test_there_are_82_in_four_documents_and_each_is_answered_somewhere_or_says_why_it_waits() -> None:
    counts = Counter(claim.id[:3] for claim in CATALOGUE)
    assert counts == {"000": 14, "001": 9, "002": 29, "003": 30}
    assert {claim.id for claim in CATALOGUE} == {f"{d}-{n}" for d, count in counts.items() for n in range(1, count + 1)}
    for claim in CATALOGUE:
        assert (claim.by or claim.shown or claim.waits) and {*claim.by} <= {*NAMES, PLAN, AUDIT}, claim.id
        if claim.shown:
            assert (ROOT / claim.shown.by).is_file() and claim.shown.outcome in ("confirmed", "contradicted")


def test_studies_planner_and_audit_answer_what_the_catalogue_expects_of_them() -> None:
    """A study's claims without a number are controls, or invariants of this project."""
    answered = {
        name: {number_of(claim.id) for claim in load(name).claims if not claim.control} - {None} for name in NAMES
    }
    answered |= {PLAN: {one.id for one in findings([], None)}, AUDIT: {one.id for one in audit_answers({})}}
    for source, numbers in answered.items():
        assert numbers == {claim.id for claim in CATALOGUE if source in claim.by}, source


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
