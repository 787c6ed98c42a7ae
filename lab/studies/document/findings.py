"""Everything that was found of the claims, in one form: by kept studies, by the planner and by a kept audit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lab.studies.document.calculated import answers
from lab.studies.harness.page import found_of, verdict_of
from lab.studies.harness.result import Result

if TYPE_CHECKING:
    from fp8rl.diagnose.audit.audit_report import AuditReport

PLAN, AUDIT = "plan", "audit"
"""Sources beside the studies."""
Outcome = Literal["confirmed", "contradicted", "equivalent", "undecided", "withheld", "waits for a GPU"]


@dataclass(frozen=True)
class ClaimFinding:
    """One claim of one source.

    Attributes:
        source: a study's name, `plan` or `audit`.
        id: `003-16`, with a letter where a source has several claims of a number; or a control's name.
        found: the figure alone. told: figure, interval, verdict or reason.
        why: of the verdict, in words, where the figure does not say it.
    """

    source: str
    id: str
    says: str
    found: str
    told: str
    outcome: Outcome
    why: str = ""
    control: bool = False

    @property
    def number(self) -> str | None:
        return number_of(self.id)


def number_of(id: str) -> str | None:
    """`003-16` of `003-16a`; None of a name."""
    matched = re.fullmatch(r"(\d{3}-\d+)[a-z]*", id)
    return matched[1] if matched else None


def findings(results: Sequence[Result], audited: AuditReport | None) -> list[ClaimFinding]:
    """Studies in their order, then the planner's and the audit's.

    Args:
        audited: a kept audit, if there is one.
    """
    return [*(found for result in results for found in _measured(result)), *_calculated(), *_audited(audited)]


def _measured(result: Result) -> Iterator[ClaimFinding]:
    for judged in result.judged:
        claim, (value, interval) = judged.claim, found_of(judged, result)
        outcome = "withheld" if claim.control and judged.verdict != "confirmed" else judged.verdict
        told = f"{value}, {interval}; {verdict_of(judged)}"
        control = claim.control is not None
        yield ClaimFinding(result.study.name, claim.id, claim.says, value, told, outcome, judged.why, control)


def _calculated() -> Iterator[ClaimFinding]:
    for answer in answers():
        told = f"{answer.figure} ({answer.why})" if answer.why else answer.figure
        yield ClaimFinding(PLAN, answer.id, f"{answer.claim}.", answer.figure, told, answer.verdict, answer.why)


def _audited(report: AuditReport | None) -> Iterator[ClaimFinding]:
    for claim in report.claims if report else ():
        yield ClaimFinding(AUDIT, claim.id, "", claim.finding, claim.finding, claim.verdict, claim.finding)
