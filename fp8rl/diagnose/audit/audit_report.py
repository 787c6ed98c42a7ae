"""The verdict of an audit: the precision map with what was found beside it, as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.text import Text

from fp8rl.diagnose.audit.sightings import Sighting
from fp8rl.diagnose.report import Report, graded, grid
from fp8rl.numerics.precision_map import CLASSES, DOCUMENTED

_NOT_IN_EVERY_RUN = {
    "head.weight",
    "product.cached",
    *(each.key for each in CLASSES if each.key.startswith("experts.")),
}
"""A head may be tied to the embedding, a run in BF16 has no codes, and a dense model no experts."""
_SHOWN = 3
"""Names that a difference spells out."""
Verdict = Literal["confirmed", "contradicted", "undecided"]
Found = Mapping[str, Mapping[str, int]]
"""Counts of each format that was seen, by class of the precision map."""

FP8 = {"e4m3", "e5m2"}
FORWARD = ("norm.reduction", "router.softmax", "loss.reduction", "scores.output")
"""Classes of a forward, beside the attention's softmax, that are computed outside FP8 products."""
BACKWARD = ("gradient.stream", "gradient.weight", "gradient.buffer", "gradient.wire", "product.gradient")
OPTIMIZER = ("master", "gain.master", "moment", "clipping.norm")


@dataclass(frozen=True)
class Row:
    """One class of tensors; `key`, `row`, `tensors`, `document` are those of `precision_map.TensorClass`."""

    key: str
    row: str
    tensors: str
    document: str
    planned: list[str]
    """Formats that will do."""
    found: dict[str, int]
    """Counts by format; none where no such tensor was seen: the run has none, or a kernel fuses what is around it."""
    bytes: int
    """Of what is held or sent."""


@dataclass(frozen=True)
class Deviation:
    """Tensors of one class that are not as planned."""

    key: str
    names: list[str]
    planned: str
    found: str
    why: str
    """The reason for the plan."""
    remedy: str
    """The place to look at."""


@dataclass(frozen=True)
class AuditClaim:
    """An answer to one claim of the published precision map."""

    id: str
    finding: str
    """In one line."""
    verdict: Verdict
    """Of this run alone."""


@dataclass(frozen=True)
class AuditReport(Report):
    """The findings of an audit. Its JSON has these keys, and `schema`, `ok`, `unseen` and `claims`."""

    spec_digest: str
    mode: str
    trainer: str
    rollout: str
    rows: list[Row]
    """The precision map."""
    differences: list[Deviation]
    tokens: int
    """Of the step that was watched."""
    seconds: float
    """Of the whole audit."""

    @property
    def ok(self) -> bool:
        return not self.differences

    @property
    def unseen(self) -> list[str]:
        """Classes in the rows of the published map of which nothing was seen, though every model has them."""
        return [r.key for r in self.rows if r.row in DOCUMENTED and not r.found and r.key not in _NOT_IN_EVERY_RUN]

    @property
    def claims(self) -> list[AuditClaim]:
        return answers({row.key: row.found for row in self.rows})

    def derived(self) -> dict[str, Any]:
        return {"unseen": self.unseen, "claims": [dataclasses.asdict(claim) for claim in self.claims]}


def rows_of(sightings: Iterable[Sighting]) -> list[Row]:
    """Fill the precision map with all that was seen of each class."""
    by_key: dict[str, list[Sighting]] = {each.key: [] for each in CLASSES}
    for sighting in sightings:
        by_key[sighting.key].append(sighting)
    rows = []
    for each in CLASSES:
        seen, found = by_key[each.key], Counter[str]()
        for sighting in seen:
            found[sighting.found] += sighting.calls
        rows.append(
            Row(
                key=each.key,
                row=each.row,
                tensors=each.tensors,
                document=each.document,
                planned=list(dict.fromkeys(form for sighting in seen for form in sighting.planned)),
                found=dict(found),
                bytes=sum(sighting.bytes for sighting in seen),
            )
        )
    return rows


def differences_of(sightings: Sequence[Sighting]) -> list[Deviation]:
    """Name what is not as planned, in the order of the map, tensors of one class and format together."""
    wrong: dict[tuple[str, tuple[str, ...], str], dict[str, None]] = {}
    for sighting in sightings:
        if sighting.found not in sighting.planned:
            wrong.setdefault((sighting.key, sighting.planned, sighting.found), {})[sighting.name] = None
    classes = {each.key: each for each in CLASSES}
    order = list(classes)
    return [
        Deviation(key, list(names), " or ".join(planned), found, classes[key].why, classes[key].remedy)
        for (key, planned, found), names in sorted(wrong.items(), key=lambda item: order.index(item[0][0]))
    ]


def rendered(report: AuditReport) -> RenderableType:
    """Render the map, what differs with the reason and the remedy, and the verdict."""
    wrong, last = {difference.key for difference in report.differences}, ""
    rows: list[tuple[RenderableType, ...]] = []
    for row in report.rows:
        if not row.found:
            continue
        if row.row != last:
            rows.append(("", Text(row.row, style="bold")))
        last = row.row
        found = ", ".join(f"{form} x {count:,}" for form, count in row.found.items())
        size = f"{row.bytes:,}" if row.bytes else ""
        verdict = graded("FAIL", "bad") if row.key in wrong else graded("pass", "good")
        rows.append((verdict, f"  {row.key}", " or ".join(row.planned), found, size))
    lines = []
    for each in report.differences:
        rest = f" and {len(each.names) - _SHOWN} more" if len(each.names) > _SHOWN else ""
        names = ", ".join(each.names[:_SHOWN]) + rest
        lines += ["", f"{each.key}: found {each.found}, planned {each.planned}: {names}", f"{each.why} {each.remedy}"]
    if report.unseen:
        unseen = f"not seen, as a kernel fuses it or rounds otherwise than its definition: {', '.join(report.unseen)}"
        lines += ["", unseen]
    what = "everything is as planned" if report.ok else f"{len(report.differences)} differences"
    end = f"audit {'passed' if report.ok else 'failed'} in {report.seconds:.0f} s: {what}"
    return Group(
        grid(("", "tensors", "planned", "found", "bytes"), rows, numbers=4),
        *(Text(line, style="yellow") for line in lines),
        Text(),
        graded(end, "good" if report.ok else "bad"),
    )


# The claims of the published precision map (002-15 to 002-19), answered from what was found alone.


def answers(found: Found) -> list[AuditClaim]:
    """Give the verdict of one audit on each claim that an audit can answer."""

    def seen(*keys: str) -> set[str]:
        return {form for key in keys for form in found.get(key, {})}

    def said(*keys: str) -> str:
        return " and ".join(sorted(seen(*keys)))

    def otherwise(wanted: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Return the classes of which nothing was seen, and those that were seen in other formats."""
        return [key for key in wanted if not seen(key)], [
            f"{key} {said(key)}" for key, form in wanted.items() if seen(key) and seen(key) != {form}
        ]

    # 002-15: FP8 is a decision of kernels; results leave as BF16.
    if not FP8 & seen("product.activation") or not seen("product.output"):
        leaves = AuditClaim("002-15", "no FP8 product was seen", "undecided")
    else:
        outputs = ("product.output", "experts.output", "attention.output", "norm.output", "residual")
        finding = f"products take {said('product.activation')}, and what leaves modules is {said(*outputs)}"
        leaves = AuditClaim("002-15", finding, "confirmed" if seen(*outputs) == {"bf16"} else "contradicted")

    # 002-17: backward and optimizer are uniformly FP32.
    unseen, others = otherwise(dict.fromkeys((*BACKWARD, *OPTIMIZER), "fp32"))
    uniform = AuditClaim("002-17", "gradients, buffers, masters and moments are FP32", "confirmed")
    if unseen:
        uniform = AuditClaim("002-17", f"not seen: {', '.join(unseen)}", "undecided")
    elif others:
        uniform = AuditClaim("002-17", f"not FP32: {', '.join(others)}", "contradicted")

    # 002-18: softmax is the only op of the forward that escapes to FP32.
    escaped = [key for key in FORWARD if "fp32" in seen(key)]
    softmax = AuditClaim("002-18", "nothing else of the forward was seen in FP32", "confirmed")
    if not seen("softmax.reduction"):
        softmax = AuditClaim("002-18", "no softmax was seen", "undecided")
    elif escaped:
        softmax = AuditClaim("002-18", f"FP32 too: {', '.join(escaped)}", "contradicted")

    # 002-19: RMSNorm and softmax reduce in FP32, AdamW updates FP32 masters, from which BF16 shadows are made.
    fp32 = ("norm.reduction", "softmax.reduction", "master", "gain.master", "moment")
    bf16 = ("gain.weight", "product.shadow")
    unseen, others = otherwise(dict.fromkeys(fp32, "fp32") | dict.fromkeys(bf16, "bf16"))
    all_well = "reductions, masters and moments are FP32, and weights of the forward BF16"
    recipe = AuditClaim("002-19", all_well, "confirmed")
    if unseen:
        recipe = AuditClaim("002-19", f"not seen: {', '.join(unseen)}", "undecided")
    elif others:
        recipe = AuditClaim("002-19", f"otherwise: {', '.join(others)}", "contradicted")
    return [leaves, _rows(found), uniform, softmax, recipe]


def _rows(found: Found) -> AuditClaim:
    """002-16: the twelve rows of the map."""
    otherwise, unseen = [], []
    for row in DOCUMENTED:
        seen = [each for each in CLASSES if each.row == row and each.document and found.get(each.key)]
        unseen += [] if seen else [row]
        otherwise += [
            f"{each.tensors}: {' and '.join(sorted(found[each.key]))} in place of {each.document}"
            for each in seen
            if set(found[each.key]) != {each.document}
        ]
    if unseen:
        return AuditClaim("002-16", f"nothing was seen of {', '.join(unseen)}", "undecided")
    if otherwise:
        return AuditClaim("002-16", "; ".join(otherwise), "contradicted")
    return AuditClaim("002-16", "all twelve rows are as the map says", "confirmed")
