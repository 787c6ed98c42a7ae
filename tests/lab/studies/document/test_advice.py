"""The advice is prose, and every verdict that it names is the one that was found."""

import re

import pytest

from lab.studies.document.document import ADVICE
from lab.studies.document.findings import ClaimFinding, findings, place
from lab.studies.harness.keeping import kept, kept_audit
from tests.support.paths import ROOT

CITATION = re.compile(r"\(\[(\w+)\]\(([^)]+)\): ([^)]+)\)")
VERDICTS = ("confirmed", "contradicted", "equivalent", "undecided", "withheld", "waits for a GPU")


def cited(text: str) -> list[tuple[str, str, str]]:
    """Source, claim and verdict of every citation."""
    found = []
    for source, link, claims in CITATION.findall(text):
        assert f"[{source}]({link})" == place(source)
        for claim in claims.split(", "):
            verdict = next(each for each in VERDICTS if claim.endswith(f" {each}"))
            found.append((source, claim.removesuffix(f" {verdict}"), verdict))
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], ClaimFinding]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return {(one.source, one.id): one for one in findings(kept(), kept_audit())}


@pytest.mark.slow
def test_every_verdict_that_the_advice_names_was_found(outcomes: dict[tuple[str, str], ClaimFinding]) -> None:
    named = cited(ADVICE.read_text())
    wrong = [each for each in named if outcomes[each[0], each[1]].outcome != each[2]]
    assert len(named) > 50 and not wrong


def test_every_sentence_of_advice_cites_its_evidence_and_undecided_evidence_advises_nothing() -> None:
    lines = [line for line in ADVICE.read_text().splitlines() if line.startswith("- ")]
    for line in lines:
        verdicts = {verdict for _, _, verdict in cited(line)}
        assert verdicts, line
        assert line.startswith("- Undecided: ") == (verdicts == {"undecided"}), line
