"""The 82 claims, of studies, planner and table of formats: none is left over, and none is claimed to be answered."""

from collections import Counter

from lab.studies.document.findings import CATALOGUE, FORMATS, PLAN, findings, number_of
from lab.studies.document.published_map import answers as format_answers
from lab.studies.harness.study import NAMES, load
from tests.support.paths import ROOT


def test_there_are_82_in_four_documents_and_each_is_answered_somewhere_or_says_why_it_waits() -> None:
    counts = Counter(claim.id[:3] for claim in CATALOGUE)
    assert counts == {"000": 14, "001": 9, "002": 29, "003": 30}
    assert {claim.id for claim in CATALOGUE} == {f"{d}-{n}" for d, count in counts.items() for n in range(1, count + 1)}
    for claim in CATALOGUE:
        assert (claim.by or claim.shown or claim.waits) and {*claim.by} <= {*NAMES, PLAN, FORMATS}, claim.id
        if claim.shown:
            assert (ROOT / claim.shown.by).is_file() and claim.shown.outcome in ("confirmed", "contradicted")


def test_studies_planner_and_formats_answer_what_the_catalogue_expects_of_them() -> None:
    """A study's claims without a number are controls, or invariants of this project."""
    answered = {
        name: {number_of(claim.id) for claim in load(name).claims if not claim.control} - {None} for name in NAMES
    }
    answered |= {PLAN: {one.id for one in findings([], [])}, FORMATS: {one.id for one in format_answers({})}}
    for source, numbers in answered.items():
        assert numbers == {claim.id for claim in CATALOGUE if source in claim.by}, source
