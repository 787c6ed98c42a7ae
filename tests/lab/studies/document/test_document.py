"""The committed page is the one that the kept results make, and its advice names the verdicts that were found."""

import re
from pathlib import Path

import pytest

from lab.studies.document.document import ADVICE, PAGE, document
from lab.studies.document.findings import findings, place
from lab.studies.harness.keeping import kept, kept_formats
from lab.studies.run import run_study
from tests.support.paths import ROOT
from tests.support.studies import made_up

pytestmark = pytest.mark.slow
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


def test_page_and_advice_are_those_of_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written anew by `python -m lab.studies.document`. Undecided evidence advises nothing."""
    monkeypatch.chdir(ROOT)
    page = PAGE.read_text()
    assert page == document(kept(), kept_formats())
    anchors = {line.replace("## ", "#") for line in page.splitlines() if line.startswith("## ")}
    for link in re.findall(r"\]\(([^)]+)\)", page):
        assert link in anchors or (PAGE.parent / link).is_file(), link
    outcomes = {(one.source, one.id): one.outcome for one in findings(kept(), kept_formats())}
    named = cited(ADVICE.read_text())
    assert len(named) > 50 and all(outcomes[source, claim] == verdict for source, claim, verdict in named)
    for line in (line for line in ADVICE.read_text().splitlines() if line.startswith("- ")):
        verdicts = {verdict for _, _, verdict in cited(line)}
        assert verdicts and line.startswith("- Undecided: ") == (verdicts == {"undecided"}), line


def test_an_undecided_claim_and_a_quick_run_have_no_verdict(tmp_path: Path) -> None:
    for quick, loss, outcome in ((False, 0.39, "undecided"), (True, 0.3, "withheld")):
        result = run_study(made_up(loss=loss), quick=quick, seeds=None, folder=tmp_path, say=print)
        (one,) = (one for one in findings([result], []) if one.id == "003-16" and one.source == "made_up")
        assert one.outcome == outcome
