"""One thing that a preflight looked at, and what it found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fp8rl.diagnose.difference import Difference
from fp8rl.diagnose.report import Report
from fp8rl.numerics.errors import UserError

Agreement = Literal["spec", "bytes", "logprobs"]
"""Same spec, same bytes, same log-probabilities."""


@dataclass(frozen=True)
class Check:
    """One thing that both sides must agree on, and whether they do.

    Attributes:
        agreement: the agreement that it belongs to.
        found, expected: as text. remedy: what to do, empty where nothing is wrong.
    """

    agreement: Agreement
    name: str
    ok: bool
    found: str
    expected: str
    remedy: str = ""


def judged(agreement: Agreement, name: str, ok: bool, *, found: str, expected: str, remedy: str) -> Check:
    """A check that keeps its remedy only if it failed."""
    return Check(agreement, name, ok, found, expected, "" if ok else remedy)


def refused(agreement: Agreement, name: str, error: UserError) -> Check:
    """The check that failed with `error`."""
    found = f"{error.key} = {error.found}" if error.key else str(error)
    return Check(agreement, name, False, found, error.expected, error.remedy)


# The verdict of a preflight: per agreement and check, as a table for people and as JSON for machines.

_TITLES: dict[Agreement, str] = {"spec": "same spec", "bytes": "same bytes", "logprobs": "same logprobs"}


@dataclass(frozen=True)
class PreflightReport(Report):
    """What a preflight found. Its JSON has these keys, and `schema`, `ok` and `verdicts` (agreement to pass or fail).

    Attributes:
        spec_digest, mode, trainer, rollout: of the numerics.
        checks: in the order in which they were made; those behind one that stops everything are missing.
        quantized: HF names of the weights that run in FP8, of the `trainer` and the `engine`.
        differences: by name, `trainer against engine` and the floors; of those that were measured.
        seconds: of the whole preflight.
    """

    spec_digest: str
    mode: str
    trainer: str
    rollout: str
    checks: list[Check]
    quantized: dict[str, list[str]]
    differences: dict[str, Difference]
    seconds: float

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def verdicts(self) -> dict[Agreement, bool | None]:
        """Whether each agreement holds; None where nothing of it was checked."""
        return {agreement: _verdict(self.checks, agreement) for agreement in get_args(Agreement)}

    def derived(self) -> dict[str, Any]:
        return {"verdicts": self.verdicts}


def rendered(report: PreflightReport) -> RenderableType:
    """The checks by agreement, what was expected and what to do for those that failed, and the verdict."""
    parts: list[RenderableType] = [part for agreement in _TITLES for part in _section(report, agreement)]
    said = {True: "holds", False: "does not hold", None: "was not reached"}
    verdicts = ", ".join(f"{_TITLES[agreement]} {said[verdict]}" for agreement, verdict in report.verdicts.items())
    text = f"preflight {'passed' if report.ok else 'failed'} in {report.seconds:.0f} s: {verdicts}"
    return Group(*parts, Text(), Text(text, style=_style(report.ok)))


def _section(report: PreflightReport, agreement: Agreement) -> Iterator[RenderableType]:
    checks = [check for check in report.checks if check.agreement == agreement]
    if not checks:
        return
    yield Text(_TITLES[agreement], style="bold")
    table = Table(box=None, pad_edge=False, show_header=False)
    for overflow in ("ignore", "ignore", "fold"):
        table.add_column(overflow=overflow, no_wrap=overflow == "ignore")
    for check in checks:
        table.add_row(Text(" pass" if check.ok else " FAIL", style=_style(check.ok)), check.name, Text(check.found))
        if not check.ok:
            table.add_row("", "", Text(f"expected {check.expected}", style="yellow"))
            table.add_row("", "", Text(check.remedy, style="yellow"))
    yield table


def _style(ok: bool) -> str:
    return "bold green" if ok else "bold red"


def _verdict(checks: Sequence[Check], agreement: Agreement) -> bool | None:
    own = [check.ok for check in checks if check.agreement == agreement]
    return all(own) if own else None
