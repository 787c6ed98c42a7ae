"""The verdict on a dump: how far engine and trainer are from the model, which of them, where, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fp8rl.diagnose.certify.dump.explain import Explanation
from fp8rl.diagnose.certify.dump.tokens import Part
from fp8rl.diagnose.difference import Difference, shown_number
from fp8rl.diagnose.report import Report
from fp8rl.rl.report import page

Verdict = Literal["equal", "within the floor", "above the floor", "broken"]
VERDICTS: tuple[Verdict, ...] = ("equal", "within the floor", "above the floor", "broken")
_STYLES = dict(zip(VERDICTS, ("bold green", "bold green", "bold yellow", "bold red"), strict=True))


@dataclass(frozen=True)
class SideReport:
    """The engine, or the trainer.

    reference: its difference from the model in FP32. ours: from our exact ops, by their numerics.
    explanations: mistakes that explain nearly all of the difference, the likeliest first. unrelated: it hardly follows
    the model at all. tried: all mistakes that were looked for, those that leave least first.
    """

    name: str
    verdict: Verdict
    reference: Difference
    ours: dict[str, Difference]
    explanations: list[Explanation]
    unrelated: bool
    tried: list[Explanation] = field(default_factory=list)


@dataclass(frozen=True)
class WorstRow:
    """An answer that differs most from the model. place: in the dump. means: of abs(d), by side."""

    place: str
    tokens: int
    means: dict[str, float | None]


@dataclass(frozen=True)
class DumpReport(Report):
    """What was found of a dump. Its JSON has these keys, and `schema`, `ok` and `verdict`.

    Attributes:
        dump, kind: the file, and what wrote it. model: directory of the weights.
        rows, of_rows: that were scored, of all. tokens: sampled ones that were compared.
        temperatures: by which logits were divided.
        floor: the model in BF16 from the model in FP32, both by transformers.
        ours: our exact ops from the model in FP32, by their numerics. why_not_ours: why they have not scored
            all of it, if so.
        sides: the engine, and the trainer if the dump has one. between: engine from trainer.
        parts: of the tokens, by place in the answer, length and more. histogram: counts of abs(d) by power of ten, by
            side. worst: rows that differ most.
        notes: what was taken for granted, or looks odd. unread: keys of the dump that were not looked at.
        seconds: of all.
    """

    dump: str
    kind: str
    model: str
    rows: int
    of_rows: int
    tokens: int
    temperatures: list[float]
    floor: Difference
    ours: dict[str, Difference]
    why_not_ours: str
    sides: list[SideReport]
    between: Difference | None
    parts: list[Part]
    histogram: dict[str, dict[str, int]]
    worst: list[WorstRow]
    notes: list[str]
    unread: list[str]
    seconds: float

    @property
    def ok(self) -> bool:
        return self.verdict in ("equal", "within the floor")

    @property
    def verdict(self) -> Verdict:
        """That of the side that is worst."""
        return max((side.verdict for side in self.sides), key=VERDICTS.index)

    def derived(self) -> dict[str, Any]:
        return {"verdict": self.verdict}


def differences(report: DumpReport) -> list[tuple[str, Difference]]:
    """Each comparison by name, in the order in which they are shown."""
    found = [(f"{side.name} from the model in FP32", side.reference) for side in report.sides]
    found.append(("floor: the model in BF16 from the model in FP32", report.floor))
    found += [(f"{name}, from the model in FP32", each) for name, each in report.ours.items()]
    if report.between is not None:
        found.append(("the engine from the trainer", report.between))
    return found + [(f"{side.name} from {name}", each) for side in report.sides for name, each in side.ours.items()]


def sentence(side: SideReport, report: DumpReport) -> str:
    """What was found of a side, in words."""
    mean, floor = side.reference.mean, report.floor.mean
    far = f"mean |d| {shown_number(mean)} from the model in FP32, and the model in BF16 {shown_number(floor)}"
    if side.verdict == "equal":
        name = next(name for name, each in side.ours.items() if each.zero)
        return f"{side.name}: equal to {name}, bit for bit, on {side.reference.tokens:,} tokens"
    if side.explanations:
        first = side.explanations[0]
        left = f"mean |d| {shown_number(first.before)}, and {shown_number(first.after)} with that made good"
        return f"{side.name}: broken: {first.text} ({left})"
    times = f", {mean / floor:.1f} times as far" if mean is not None and floor else ""
    if side.verdict == "within the floor":
        return f"{side.name}: within the floor: {far}{times}"
    hardly = "; it hardly follows this model, as with other weights or other tokens" if side.unrelated else ""
    return f"{side.name}: off, cause unknown: {far}{times}{hardly}{_like(side, report)}{_tried(side)}"


def _tried(side: SideReport) -> str:
    """What was looked for in vain, and how much each explains."""
    if not side.tried:
        return ""
    best: dict[str, Explanation] = {}
    for each in side.tried:
        best.setdefault(each.name, each)
    shares = [f"{name} {max(0.0, 1 - each.after / each.before):.0%}" for name, each in best.items() if each.before]
    return f". Tried, and how much of it each explains: {', '.join(shares)}"


def _like(side: SideReport, report: DumpReport) -> str:
    """Our own numerics that are about as far from the model, of a side that is above the floor."""
    if side.verdict != "above the floor" or not side.reference.mean:
        return ""
    near = [name for name, each in report.ours.items() if each.mean and 0.5 <= side.reference.mean / each.mean <= 2.0]
    return f"; {near[-1]}, is about as far" if near else ""


def rendered(report: DumpReport) -> RenderableType:
    """The comparisons, what else was noticed, and the verdict on each side."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("log-probabilities", overflow="fold")
    for heading in ("|d| mean", "p50", "p99", "max", "KL (k3)", "equal"):
        table.add_column(heading, justify="right")
    for name, each in differences(report):
        numbers = (each.mean, each.p50, each.p99, each.max, each.k3_kl)
        share = "" if each.exact_frac is None else f"{100 * each.exact_frac:.3g}%"
        table.add_row(name, *map(shown_number, numbers), share)
    rows = f"{report.rows:,} of {report.of_rows:,} rows" if report.rows < report.of_rows else f"{report.rows:,} rows"
    what = f"{report.dump}, {report.kind}: {rows}, {report.tokens:,} sampled tokens; weights of {report.model}"
    verdicts = [Text(sentence(side, report), style=_STYLES[side.verdict]) for side in report.sides]
    return Group(what, Text(), table, Text(), *map(Text, report.notes), *verdicts)


# The page of a dump: the verdict, the comparisons, and where the differences sit, in one file without a network.

Chart = dict[str, Any]
"""`title`, `note`, `unit` of the values, `x` labels, and `series` of `name` and `y`."""
_NOTES = {
    "place in the answer": "A difference that grows along the answer adds up: a cache, or a beginning that is another.",
    "length of the answer": "Tokens of all answers of such a length.",
    "temperature": "A temperature that is treated wrongly stands out.",
    "probability of the token": "By the model in FP32. Rare tokens differ most wherever numbers are rounded.",
    "kind of token": "Special tokens, such as the end of an answer, against text.",
    "weight version": "The version whose weights were scored should differ least.",
}


def write_page(report: DumpReport, path: Path) -> None:
    """Write the page to `path`."""
    page.write_page(
        path,
        "certify",
        _charts(report),
        kind="certify",
        name=Path(report.dump).name,
        verdict=[sentence(side, report) for side in report.sides],
        report=report,
        rows=differences(report),
    )


def _charts(report: DumpReport) -> list[Chart]:
    names = [side.name for side in report.sides] + ["floor"]
    sizes = list(report.histogram["floor"])
    spread: Chart = {
        "title": "How large differences are",
        "note": "Tokens by |d| from the model in FP32: exactly 0, and from each power of ten up to the next.",
        "unit": "tokens",
        "x": sizes,
        "series": [{"name": name, "y": [report.histogram[name][size] for size in sizes]} for name in names],
    }
    charts = [spread]
    for by in dict.fromkeys(part.by for part in report.parts):
        some = [part for part in report.parts if part.by == by]
        if len(some) > 1:
            series = [{"name": name, "y": [part.means[name] for part in some]} for name in names]
            x = [f"{part.label} ({part.tokens:,})" for part in some]
            title = f"By {by}"
            charts.append({"title": title, "note": _NOTES[by], "unit": "mean |d| in nats", "x": x, "series": series})
    return charts
