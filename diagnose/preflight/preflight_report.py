"""The report of a preflight: its checks, and the verdict on each agreement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fp8rl.diagnose.difference import Difference
from fp8rl.diagnose.report import Report, graded
from fp8rl.numerics.core.errors import UserError

Agreement = Literal["spec", "bytes", "logprobs"]
_TITLES: dict[Agreement, str] = {"spec": "same spec", "bytes": "same bytes", "logprobs": "same logprobs"}


@dataclass(frozen=True)
class Check:
    """One thing that both sides must agree on, and whether they do."""

    agreement: Agreement
    name: str
    ok: bool
    found: str
    expected: str
    remedy: str = ""
    """Empty where nothing is wrong."""


def judged(agreement: Agreement, name: str, ok: bool, *, found: str, expected: str, remedy: str) -> Check:
    """Make a check that keeps its remedy only if it failed."""
    return Check(agreement, name, ok, found, expected, "" if ok else remedy)


def refused(agreement: Agreement, name: str, error: UserError) -> Check:
    """Make the check that failed with `error`."""
    found = f"{error.key} = {error.found}" if error.key else str(error)
    return Check(agreement, name, False, found, error.expected, error.remedy)


@dataclass(frozen=True)
class PreflightReport(Report):
    """The findings of a preflight. Its JSON has these keys, and `schema`, `ok` and `verdicts` (by agreement)."""

    spec_digest: str
    mode: str
    trainer: str
    rollout: str
    checks: list[Check]
    """In the order in which they were made; those behind one that stops everything are missing."""
    quantized: dict[str, list[str]]
    """HF names of the weights that run in FP8, of the `trainer` and the `engine`."""
    differences: dict[str, Difference]
    """By name, `trainer against engine` and the floors; of those that were measured."""
    seconds: float
    """Of the whole preflight."""

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def verdicts(self) -> dict[Agreement, bool | None]:
        """By agreement, whether it holds; None where nothing of it was checked."""
        made = {agreement: [check.ok for check in self.checks if check.agreement == agreement] for agreement in _TITLES}
        return {agreement: all(checks) if checks else None for agreement, checks in made.items()}

    def derived(self) -> dict[str, Any]:
        return {"verdicts": self.verdicts}


def rendered(report: PreflightReport) -> RenderableType:
    """Render the checks by agreement, for those that failed the expectation and the remedy, and the verdict."""
    parts: list[RenderableType] = []
    for agreement, title in _TITLES.items():
        table = Table(box=None, pad_edge=False, show_header=False)
        for overflow in ("ignore", "ignore", "fold"):
            table.add_column(overflow=overflow, no_wrap=overflow == "ignore")  # type: ignore[arg-type]
        for check in report.checks:
            if check.agreement == agreement:
                passed = graded(" pass", "good") if check.ok else graded(" FAIL", "bad")
                table.add_row(passed, check.name, Text(check.found))
                for line in () if check.ok else (f"expected {check.expected}", check.remedy):
                    table.add_row("", "", Text(line, style="yellow"))
        parts += [Text(title, style="bold"), table] if table.row_count else []
    said = {True: "holds", False: "does not hold", None: "was not reached"}
    verdicts = ", ".join(f"{_TITLES[agreement]} {said[verdict]}" for agreement, verdict in report.verdicts.items())
    end = f"preflight {'passed' if report.ok else 'failed'} in {report.seconds:.0f} s: {verdicts}"
    return Group(*parts, Text(), graded(end, "good" if report.ok else "bad"))
