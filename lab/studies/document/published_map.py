"""The claims of the published precision map (002-15 to 002-19), from the formats that were seen in one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fp8rl.numerics.precision_map import CLASSES, DOCUMENTED

Verdict = Literal["confirmed", "contradicted", "undecided"]
Rows = Sequence[Mapping[str, Any]]
"""Rows of the doctor's table (`diagnose.doctor.formats.Row`), as JSON values."""
Found = Mapping[str, Mapping[str, int]]
"""Counts of each format that was seen, by class of the precision map."""

FP8 = {"e4m3", "e5m2"}
FORWARD = ("norm.reduction", "router.softmax", "loss.reduction", "scores.output")
"""Classes of a forward, beside the attention's softmax, that are computed outside FP8 products."""
BACKWARD = ("gradient.stream", "gradient.weight", "gradient.buffer", "gradient.wire", "product.gradient")
OPTIMIZER = ("master", "gain.master", "moment", "clipping.norm")


@dataclass(frozen=True)
class MapClaim:
    """An answer to one claim of the published precision map."""

    id: str
    finding: str
    """In one line."""
    verdict: Verdict
    """Of this run alone."""


def claims(rows: Rows) -> list[MapClaim]:
    """Give the verdicts of a table of formats."""
    return answers({row["key"]: row["trainer"] for row in rows})


def answers(found: Found) -> list[MapClaim]:
    """Give the verdict on each claim that the formats of one step can answer."""

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
        leaves = MapClaim("002-15", "no FP8 product was seen", "undecided")
    else:
        outputs = ("product.output", "experts.output", "attention.output", "norm.output", "residual")
        finding = f"products take {said('product.activation')}, and what leaves modules is {said(*outputs)}"
        leaves = MapClaim("002-15", finding, "confirmed" if seen(*outputs) == {"bf16"} else "contradicted")

    # 002-17: backward and optimizer are uniformly FP32.
    unseen, others = otherwise(dict.fromkeys((*BACKWARD, *OPTIMIZER), "fp32"))
    uniform = MapClaim("002-17", "gradients, buffers, masters and moments are FP32", "confirmed")
    if unseen:
        uniform = MapClaim("002-17", f"not seen: {', '.join(unseen)}", "undecided")
    elif others:
        uniform = MapClaim("002-17", f"not FP32: {', '.join(others)}", "contradicted")

    # 002-18: softmax is the only op of the forward that escapes to FP32.
    escaped = [key for key in FORWARD if "fp32" in seen(key)]
    softmax = MapClaim("002-18", "nothing else of the forward was seen in FP32", "confirmed")
    if not seen("softmax.reduction"):
        softmax = MapClaim("002-18", "no softmax was seen", "undecided")
    elif escaped:
        softmax = MapClaim("002-18", f"FP32 too: {', '.join(escaped)}", "contradicted")

    # 002-19: RMSNorm and softmax reduce in FP32, AdamW updates FP32 masters, from which BF16 shadows are made.
    fp32 = ("norm.reduction", "softmax.reduction", "master", "gain.master", "moment")
    bf16 = ("gain.weight", "product.shadow")
    unseen, others = otherwise(dict.fromkeys(fp32, "fp32") | dict.fromkeys(bf16, "bf16"))
    all_well = "reductions, masters and moments are FP32, and weights of the forward BF16"
    recipe = MapClaim("002-19", all_well, "confirmed")
    if unseen:
        recipe = MapClaim("002-19", f"not seen: {', '.join(unseen)}", "undecided")
    elif others:
        recipe = MapClaim("002-19", f"otherwise: {', '.join(others)}", "contradicted")
    return [leaves, _rows(found), uniform, softmax, recipe]


def _rows(found: Found) -> MapClaim:
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
        return MapClaim("002-16", f"nothing was seen of {', '.join(unseen)}", "undecided")
    if otherwise:
        return MapClaim("002-16", "; ".join(otherwise), "contradicted")
    return MapClaim("002-16", "all twelve rows are as the map says", "confirmed")
