"""What became of each of the 82 claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.studies.document.catalogue import CATALOGUE, Listed
from lab.studies.document.findings import AUDIT, PLAN, ClaimFinding


@dataclass(frozen=True)
class ClaimStanding:
    """What became of a claim: `verdict` in Markdown, and `where` it is found."""

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
    """What is said where a source has found nothing yet."""
    if source == AUDIT:
        return "no audit is kept yet"
    return f"`fp8rl study {source}` has no kept result yet"


def place(source: str, kept: bool = True) -> str:
    """A source as a link to what it found."""
    if source == PLAN:
        return "[plan](plan.md)"
    if source == AUDIT:
        return "[audit](precision.md)"
    return f"[{source}](#{source})" if kept else source


def strong(outcome: str) -> str:
    """A verdict as tables show it."""
    return f"**{outcome}**" if outcome in ("confirmed", "contradicted") else outcome


def link(path: str) -> str:
    """A file of the repository, as the page links it."""
    name = path.rpartition("/")[2]
    return f"[{name}]({path.removeprefix('docs/') if path.startswith('docs/') else '../' + path})"
