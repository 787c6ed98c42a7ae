"""The 82 claims of the source documents, everything that was found of them, by kept studies, by the planner and by a
kept table of formats, and what became of each."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from lab.studies.document.calculated import answers
from lab.studies.document.published_map import Rows, claims
from lab.studies.harness.page import found_of, verdict_of
from lab.studies.harness.result import Result

PLAN, FORMATS = "plan", "formats"
"""Sources beside the studies."""
Outcome = Literal["confirmed", "contradicted", "equivalent", "undecided", "withheld", "waits for a GPU"]


@dataclass(frozen=True)
class ClaimFinding:
    """One claim of one source."""

    source: str
    """A study's name, `plan` or `formats`."""
    id: str
    """`003-16`, with a letter where a source has several claims of a number; or a control's name."""
    says: str
    found: str
    """The figure alone."""
    told: str
    """Figure, interval, verdict or reason."""
    outcome: Outcome
    why: str = ""
    """Of the verdict, in words, where the figure does not say it."""
    control: bool = False

    @property
    def number(self) -> str | None:
        return number_of(self.id)


def number_of(id: str) -> str | None:
    """`003-16` of `003-16a`; None of a name."""
    matched = re.fullmatch(r"(\d{3}-\d+)[a-z]*", id)
    return matched[1] if matched else None


def findings(results: Sequence[Result], formats: Rows) -> list[ClaimFinding]:
    """Studies in their order, then the planner's and those of the table of formats.

    Args:
        formats: the kept table of formats; empty: there is none.
    """
    return [*(found for result in results for found in _measured(result)), *_calculated(), *_seen(formats)]


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


def _seen(rows: Rows) -> Iterator[ClaimFinding]:
    for claim in claims(rows) if rows else ():
        yield ClaimFinding(FORMATS, claim.id, "", claim.finding, claim.finding, claim.verdict, claim.finding)


@dataclass(frozen=True)
class Shown:
    """A claim that the code keeps or breaks, without a measurement."""

    outcome: str
    why: str
    by: str
    """The page or the test that shows it, from the repository's root."""


@dataclass(frozen=True)
class Listed:
    """One claim of the four documents."""

    id: str
    """Document and number, `003-16`."""
    says: str
    by: tuple[str, ...] = ()
    """Studies, `plan` and `formats`, which have a verdict on it."""
    shown: Shown | None = None
    waits: str = ""
    """What of it waits for a GPU, and why."""


def _listed() -> Iterator[Listed]:
    for row in yaml.safe_load(Path(__file__).with_name("catalogue.yaml").read_text(encoding="utf-8")):
        shown = Shown(**row["shown"]) if "shown" in row else None
        yield Listed(row["id"], row["says"], tuple(row.get("by", ())), shown, row.get("waits", ""))


CATALOGUE = tuple(_listed())


@dataclass(frozen=True)
class ClaimStanding:
    """A claim with its `verdict` in Markdown, and `where` that is found."""

    claim: Listed
    verdict: str
    where: str


def standings(found: Sequence[ClaimFinding]) -> list[ClaimStanding]:
    """A line for each of the 82: its verdicts, what has not been measured yet, and what waits for a GPU."""
    return [_standing(claim, found) for claim in CATALOGUE]


def _standing(claim: Listed, found: Sequence[ClaimFinding]) -> ClaimStanding:
    parts, where = [], []
    for source in claim.by:
        mine = [one for one in found if one.source == source and one.number == claim.id]
        where.append(place(source, bool(mine)))
        said = _outcomes(mine) if mine else missing(source)
        parts.append(f"{said} ({source})" if mine and len(claim.by) > 1 else said)
    if claim.shown:
        parts.append(f"{strong(claim.shown.outcome)}: {claim.shown.why}")
        where.append(link(claim.shown.by))
    if claim.waits:
        parts.append(f"waiting for a GPU: {claim.waits}")
    return ClaimStanding(claim, "; ".join(parts), ", ".join(where))


def _outcomes(mine: Sequence[ClaimFinding]) -> str:
    """The verdict of one claim; for several, each verdict with the letters that it belongs to."""
    if len(mine) == 1:
        return strong(mine[0].outcome) + (f": {mine[0].why}" if mine[0].why else "")
    letters: dict[str, list[str]] = {}
    for one in mine:
        letters.setdefault(one.outcome, []).append(one.id.removeprefix(one.number or "") or one.id)
    if len(letters) == 1:
        return f"{strong(mine[0].outcome)} (all {len(mine)})"
    return ", ".join(f"{strong(outcome)} ({', '.join(those)})" for outcome, those in letters.items())


def missing(source: str) -> str:
    """Say that a source has found nothing yet."""
    if source == FORMATS:
        return "no table of formats is kept yet"
    return f"`fp8rl study {source}` has no kept result yet"


def place(source: str, kept: bool = True) -> str:
    """A source as a link to what it found."""
    if source == PLAN:
        return "[plan](../../docs/plan.md)"
    if source == FORMATS:
        return "[formats](../../docs/exactness.md)"
    return f"[{source}](#{source})" if kept else source


def strong(outcome: str) -> str:
    """A verdict as tables show it."""
    return f"**{outcome}**" if outcome in ("confirmed", "contradicted") else outcome


def link(path: str) -> str:
    """A file of the repository, as lab/docs/studies.md links it."""
    return f"[{posixpath.basename(path)}]({posixpath.relpath(path, 'lab/docs')})"
