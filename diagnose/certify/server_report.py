"""The verdict on a server: in which ways its answers stay the same, and what changes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fp8rl.diagnose.certify.probe import Cause, Way
from fp8rl.diagnose.difference import shown_number
from fp8rl.diagnose.report import Report
from fp8rl.numerics.errors import shown

Verdict = Literal["certified", "broken", "undecided"]
_STYLES = {"equal": "green", "differs": "bold red", "absent": "dim", "not reached": "yellow"}
_SAID: dict[Cause, str] = {
    "repetition": "the same request once more",
    "cached prefix": "a prefix from the cache",
    "batch": "what else is in the batch",
    "prefill": "prefilling what was decoded",
    "chunked prefill": "where chunks of a long prompt begin",
    "load": "other work at the same time",
}


@dataclass(frozen=True)
class ServerReport(Report):
    """What was found of a server. Its JSON has these keys, and `schema`, `ok`, `verdict` and `breaks`.

    Attributes:
        url, model: of the server. api: SGLang or OpenAI.
        isolates: each way began with an empty cache. chunk: tokens that it prefills at once; None: it does not say.
        ways: in the order in which they were tried.
        seconds: of all requests.
    """

    url: str
    api: str
    model: str
    isolates: bool
    chunk: int | None
    ways: list[Way]
    seconds: float

    @property
    def ok(self) -> bool:
        return self.verdict == "certified"

    @property
    def verdict(self) -> Verdict:
        """Broken by one difference; certified where nothing that this server has was left out."""
        outcomes = {way.outcome for way in self.ways}
        if "differs" in outcomes:
            return "broken"
        compared = "equal" in outcomes and any(way.found and way.found.size.max is not None for way in self.ways)
        return "certified" if compared and "not reached" not in outcomes else "undecided"

    @property
    def breaks(self) -> list[Cause]:
        """What changes answers, each once."""
        return list(dict.fromkeys(way.cause for way in self.ways if way.outcome == "differs"))

    def derived(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "breaks": self.breaks}


def rendered(report: ServerReport) -> RenderableType:
    """A line for each way, the first difference, and the verdict."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, right in (
        ("the same answers", 0),
        ("", 0),
        ("differing", 1),
        ("|d| mean", 1),
        ("max", 1),
        ("cached", 1),
    ):
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for way in report.ways:
        outcome = Text(way.outcome, style=_STYLES[way.outcome])
        cached = "" if way.cached is None else f"{way.cached:,}"
        if way.found is None:
            table.add_row(way.name, outcome, "", "", "", "")
        else:
            size, share = way.found.size, f"{way.found.differing:,} of {way.found.tokens:,}"
            table.add_row(way.name, outcome, share, shown_number(size.mean), shown_number(size.max), cached)
    what = Text(f"{shown(report.model)[1:-1]} at {report.url}, asked by {report.api}'s API")
    start = "each way began with an empty cache" if report.isolates else "its cache could not be emptied between ways"
    chunk = f"chunks of {report.chunk} tokens" if report.chunk else "it does not say how long its chunks are"
    return Group(what, f"{start}; {chunk}", Text(), table, *_notes(report), Text(), _sentence(report))


def _notes(report: ServerReport) -> list[Text]:
    lines = []
    for way in report.ways:
        some = "" if way.found is None else f"asked with {way.found.answers} of its prompts, then "
        lines += [f"{way.name}: {some}{way.why}"] if way.why else []
    for cause in report.breaks:
        way = next(way for way in report.ways if way.cause == cause and way.outcome == "differs")
        if way.found is not None and (first := way.found.first) is not None:
            tokens = " and ".join(shown(token, 60) for token in dict.fromkeys(first.tokens))
            values = " against ".join("none" if value is None else f"{value!r}" for value in first.logprobs)
            lines.append(
                f"{way.name}: first at prompt {first.prompt}, token {first.position}: {tokens or 'the end'}, {values}"
            )
    return [Text(), *map(Text, lines)] if lines else []


def _sentence(report: ServerReport) -> Text:
    style = {"certified": "bold green", "broken": "bold red", "undecided": "bold yellow"}[report.verdict]
    rest = {
        "certified": "a row depends on nothing but itself, bit for bit, in every way above",
        "broken": f"answers change with {', '.join(_SAID[cause] for cause in report.breaks)}",
        "undecided": "no difference was found, but not every way was reached",
    }[report.verdict]
    return Text(f"{report.verdict}: {rest} ({report.seconds:.0f} s)", style=style)
