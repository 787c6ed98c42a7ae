"""The report on a dump, and its page: how far engine and trainer are from the model, in which tokens, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.text import Text

from fp8rl.diagnose.report import Difference, Grade, graded, grid, shown_number
from fp8rl.rl.record.console import format_difference
from fp8rl.rl.report import page
from fp8rl_certify.dump.explain import Explanation
from fp8rl_certify.dump.tokens import Part
from fp8rl_certify.report import Report

Verdict = Literal["equal", "within the floor", "above the floor", "broken"]
VERDICTS: tuple[Verdict, ...] = ("equal", "within the floor", "above the floor", "broken")
_GRADES: dict[Verdict, Grade] = dict(zip(VERDICTS, ("ok", "ok", "warning", "error"), strict=True))


@dataclass(frozen=True)
class SideReport:
    """The findings on the engine or on the trainer."""

    name: str
    verdict: Verdict
    reference: Difference
    """The difference from the model in FP32."""
    ours: dict[str, Difference]
    """The differences from our exact ops, by the ops' numerics."""
    explanations: list[Explanation] = field(default_factory=list)
    """Mistakes that explain nearly all of the difference, the likeliest first."""
    unrelated: bool = False
    """Whether the side's log-probabilities are unrelated to the model's."""
    tried: list[Explanation] = field(default_factory=list)
    """All mistakes that were tried, sorted by the difference that remains without the mistake, smallest first."""
    times: float | None = None
    """The side's mean number of floors as a multiple of BF16's."""
    slope: float = 0.0
    """The fraction by which the side's logits seem to be too large; 0 if there is no sign of it."""


@dataclass(frozen=True)
class WorstRow:
    """One of the answers that differ most from the model."""

    place: str
    """The answer's place in the dump."""
    tokens: int
    means: dict[str, float | None]
    """Mean of abs(d), by side."""


@dataclass(frozen=True)
class DumpReport(Report):
    """The findings on a dump. Its JSON has these keys, and `schema`, `ok` and `verdict`."""

    dump: str
    kind: str
    """The program that wrote the dump, in words."""
    model: str
    """Directory of the weights."""
    rows: int
    """Number of rows that were scored."""
    of_rows: int
    tokens: int
    """Number of sampled tokens that were compared."""
    temperatures: list[float]
    """The divisors of the logits."""
    floor: Difference
    """The difference of the model in BF16 from the model in FP32, both computed by transformers."""
    ours: dict[str, Difference]
    """The differences of our exact ops from the model in FP32, by the ops' numerics."""
    why_not_ours: str
    """The reason why our ops have not scored the whole dump; empty if they have."""
    sides: list[SideReport]
    """The engine, and the trainer if the dump has one."""
    between: Difference | None
    """The difference of the engine from the trainer."""
    parts: list[Part]
    """Parts of the tokens, by place in the answer, length and more."""
    histogram: dict[str, dict[str, int]]
    """Number of tokens by side and by the power of ten of abs(d)."""
    worst: list[WorstRow]
    notes: list[str]
    """Assumptions that were made, and oddities that were seen."""
    unread: list[str]
    """Keys of the dump that were not read."""
    seconds: float
    """Duration of the whole certificate."""

    @property
    def ok(self) -> bool:
        return self.verdict in ("equal", "within the floor")

    @property
    def verdict(self) -> Verdict:
        """The verdict on the worst side."""
        return max((side.verdict for side in self.sides), key=VERDICTS.index)

    def derived(self) -> dict[str, Any]:
        return {"verdict": self.verdict}


def differences(report: DumpReport) -> list[tuple[str, Difference]]:
    """Name each comparison, in the order in which they are shown."""
    found = [(f"{side.name} from the model in FP32", side.reference) for side in report.sides]
    found.append(("floor: the model in BF16 from the model in FP32", report.floor))
    found += [(f"{name}, from the model in FP32", each) for name, each in report.ours.items()]
    if report.between is not None:
        found.append(("the engine from the trainer", report.between))
    return found + [(f"{side.name} from {name}", each) for side in report.sides for name, each in side.ours.items()]


def sentence(side: SideReport, report: DumpReport) -> str:
    """Say in a sentence what was found on a side, the verdict first."""
    mean, floor = side.reference.mean, report.floor.mean
    times = "" if side.times is None else f"; token by token {side.times:.2g} times as far"
    far = f"mean |d| {shown_number(mean)} from the model in FP32, and the model in BF16 {shown_number(floor)}{times}"
    if side.verdict == "equal":
        name = next(name for name, each in side.ours.items() if each.zero)
        return f"{side.name}: equal to {name}, bit for bit, on {side.reference.tokens:,} tokens"
    if side.explanations:
        first = side.explanations[0]
        left = f"mean |d| {shown_number(first.before)}, and {shown_number(first.after)} with that made good"
        return f"{side.name}: broken: {first.text} ({left})"
    if side.verdict == "within the floor":
        return f"{side.name}: within the floor: {far}"
    hardly = "; it hardly follows this model, as with other weights or other tokens" if side.unrelated else ""
    scaled = f"; its logits are as if multiplied by {1 + side.slope:.3g}" if side.slope else ""
    like = ""
    if side.verdict == "above the floor" and mean:  # our own numerics may be about as far from the model
        near = [name for name, each in report.ours.items() if each.mean and 0.5 <= mean / each.mean <= 2.0]
        like = f"; {near[-1]}, is about as far" if near else ""
    best: dict[str, Explanation] = {}
    for each in side.tried:
        best.setdefault(each.name, each)
    parts = {name: 1 - each.floors_after / each.floors_before for name, each in best.items() if each.floors_before}
    shares = ", ".join(f"{name} {max(0.0, part):.0%}" for name, part in parts.items())
    tried = f". Tried, and how much of it each explains: {shares}" if shares else ""
    return f"{side.name}: off, cause unknown: {far}{hardly}{scaled}{like}{tried}"


def rendered(report: DumpReport) -> RenderableType:
    """Render the verdict on each side, the worst first, then the comparisons and the notes."""
    compared = []
    for name, each in differences(report):
        numbers = (each.mean, each.p50, each.p99, each.max, each.k3_kl)
        compared.append((name, *map(shown_number, numbers), _share(each)))
    rows = f"{report.rows:,} of {report.of_rows:,} rows" if report.rows < report.of_rows else f"{report.rows:,} rows"
    sides = sorted(report.sides, key=lambda side: -VERDICTS.index(side.verdict))
    return Group(
        *(graded(sentence(side, report), _GRADES[side.verdict]) for side in sides),
        Text(),
        f"{report.dump}, {report.kind}: {rows}, {report.tokens:,} sampled tokens; weights of {report.model}",
        Text(),
        grid(("log-probabilities", "|d| mean", "p50", "p99", "max", "KL (k3)", "equal"), compared, numbers=1),
        *([Text(), *map(Text, report.notes)] if report.notes else []),
    )


Chart = dict[str, Any]
"""A chart: `title`, `note`, `unit` of the values, `x` labels, and `series`, each with `name` and `y`."""
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

    def d(value: float | None) -> str:
        return "" if value is None else format_difference(value)

    headings = ("|d| mean", "p50", "p99", "max", "KL (k3)", "equal", "tokens")
    compared = [
        (name, *map(d, (e.mean, e.p50, e.p99, e.max, e.k3_kl)), _share(e), e.tokens) for name, e in differences(report)
    ]
    sides = [side.name for side in report.sides]
    rows = [(row.place, row.tokens, *(d(row.means[name]) for name in sides)) for row in report.worst]
    page.write_page(
        path,
        "certify",
        Path(report.dump).name,
        [sentence(side, report) for side in report.sides],
        [
            page.Section(
                "How far apart",
                page.Table([("Log-probabilities", ""), *((name, "n") for name in headings)], compared),
                *(page.Paragraph(note) for note in report.notes),
            ),
            *(_causes(side) for side in report.sides if side.explanations),
            page.Section("Where it sits", page.Charts(_charts(report))),
            page.Section(
                "Rows that differ most",
                page.Table([("Row", ""), ("tokens", "n"), *((f"{name}, mean |d|", "n") for name in sides)], rows),
            ),
        ],
        footer=f". {report.dump}, {report.kind}; weights of {report.model}; {report.rows} of {report.of_rows} rows. "
        "d in nats, from the model's own forward pass in FP32.",
    )


def _causes(side: SideReport) -> page.Section:
    columns: list[page.Column] = [("Cause", ""), ("Mean |d|", "n"), ("With it made good", "n"), ("tokens", "n")]
    rows = [
        (each.text, format_difference(each.before), format_difference(each.after), each.tokens)
        for each in side.explanations
    ]
    return page.Section(f"What would explain {side.name}", page.Table(columns, rows))


def _share(each: Difference) -> str:
    return "" if each.exact_frac is None else f"{100 * each.exact_frac:.3g}%"


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
