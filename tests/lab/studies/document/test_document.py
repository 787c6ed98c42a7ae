"""The page that is committed is the one that the kept results make."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from fp8rl.diagnose.audit import AuditReport, Row
from lab.studies.document.document import PAGE, document
from lab.studies.document.findings import findings
from lab.studies.document.published_map import claims
from lab.studies.harness.keeping import KEPT_AUDIT, kept, kept_audit
from lab.studies.run import run_study
from tests.support.paths import ROOT
from tests.support.studies import made_up

pytestmark = pytest.mark.slow

REPORT = AuditReport(
    spec_digest="0" * 16,
    mode="exact",
    trainer="fp8",
    rollout="fp8",
    rows=[
        Row(key, "", "", "", [form], {form: 3}, 0)
        for key, form in (("product.activation", "e4m3"), ("product.output", "bf16"), ("softmax.reduction", "fp32"))
    ]
    + [Row("norm.reduction", "", "", "", ["fp32"], {"fp32": 3}, 0)],
    differences=[],
    tokens=1,
    seconds=1.0,
)


def headings(page: str) -> Sequence[str]:
    return [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]


@pytest.mark.slow
def test_the_committed_page_is_written_from_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written anew by `python -m lab.studies.document`."""
    monkeypatch.chdir(ROOT)
    page = PAGE.read_text()
    assert page == document(kept(), kept_audit())
    anchors = {f"#{heading}" for heading in headings(page)}
    for link in re.findall(r"\]\(([^)]+)\)", page):
        assert link in anchors or (PAGE.parent / link).is_file(), link


@pytest.mark.slow
def test_contradicted_claims_come_before_confirmed_ones(tmp_path: Path) -> None:
    result = run_study(made_up(loss=0.3), quick=False, seeds=None, folder=tmp_path, say=print)
    page = document([result], REPORT)
    assert headings(page) == [
        *("Advice", "What did not hold", "What makes no difference", "What held", "What is undecided"),
        *("All 82 claims", "made_up"),
    ]
    sections = dict(zip(headings(page), page.split("\n## ")[1:], strict=True))
    assert "| 003-16 | 003-16 it is. | -0.09" in sections["What did not hold"]
    assert "| 002-18 | Softmax is the only op of the forward that escapes to FP32 |" in sections["What did not hold"]
    assert "| 003-10 | The scale is max \\|X\\|" in sections["What did not hold"]
    assert sections["What makes no difference"].endswith("Nothing.\n")
    assert "| 002-15 |" in sections["What held"] and "| 002-16 |" in sections["What is undecided"]
    assert sections["All 82 claims"].count("\n| 00") == 82
    tables = "".join(sections[name] for name in ("What did not hold", "What held", "What is undecided"))
    assert "same arm twice" not in tables and "same arm twice" in sections["made_up"]


def test_an_undecided_claim_and_a_quick_run_have_no_verdict(tmp_path: Path) -> None:
    for quick, loss, outcome in ((False, 0.39, "undecided"), (True, 0.3, "withheld")):
        result = run_study(made_up(loss=loss), quick=quick, seeds=None, folder=tmp_path, say=print)
        (one,) = (one for one in findings([result], None) if one.id == "003-16" and one.source == "made_up")
        assert one.outcome == outcome


def test_the_kept_audit_is_judged_by_the_claims_as_they_are_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert kept_audit() is None
    KEPT_AUDIT.parent.mkdir(parents=True)
    values = json.loads(REPORT.to_json())
    KEPT_AUDIT.write_text(json.dumps(values | {"claims": []}))
    audited = kept_audit()
    assert audited is not None and claims(audited) == claims(REPORT)
