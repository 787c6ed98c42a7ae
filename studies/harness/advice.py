"""Advice for each choice of a run, made of verdicts: where there is none, nothing is advised, and the text says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from studies.harness.findings import Finding, Outcome
from studies.harness.standings import place


@dataclass(frozen=True)
class Point:
    """What one claim means for a choice, or several of one source that have to come out alike.

    Attributes:
        source: a study, or `plan`. ids: of its claims or controls.
        advice: a sentence by verdict; `{found}` stands for the figures.
    """

    source: str
    ids: tuple[str, ...]
    advice: Mapping[Outcome, str]


@dataclass(frozen=True)
class Choice:
    """Something that whoever sets up a run decides, and what is known of it, the most important first."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Advised:
    """A choice as the page shows it: sentences with their evidence, and the evidence that is missing."""

    name: str
    sentences: Sequence[str]
    missing: Sequence[str]


def advise(choice: Choice, found: Sequence[Finding]) -> Advised:
    """The sentences that the verdicts come to."""
    by_claim = {(one.source, one.id): one for one in found}
    sentences: list[str] = []
    missing: list[str] = []
    for point in choice.points:
        mine = [by_claim[point.source, id] for id in point.ids if (point.source, id) in by_claim]
        if len(mine) == len(point.ids):
            sentences.append(_sentence(point, mine))
        else:
            missing.append(point.source)
    return Advised(choice.name, sentences, list(dict.fromkeys(missing)))


def _sentence(point: Point, mine: Sequence[Finding]) -> str:
    outcomes = {one.outcome for one in mine}
    evidence = f"({place(point.source)}: {', '.join(f'{one.id} {one.outcome}' for one in mine)})"
    figures = " and ".join(dict.fromkeys(one.found for one in mine))
    if len(outcomes) > 1:
        return f"No advice, as the evidence is divided. {_claims(mine)} {evidence}"
    outcome = mine[0].outcome
    if outcome in point.advice:
        return f"{point.advice[outcome].format(found=figures)} {evidence}"
    return f"No advice, as there is no verdict: {_claims(mine)} Found: {figures}. {evidence}"


def _claims(mine: Sequence[Finding]) -> str:
    return " ".join(f"“{one.says}”" for one in mine)
