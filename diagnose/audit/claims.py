"""What an audit says to the claims of the published precision map (002-15 to 002-19): from what was found alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fp8rl.numerics.precision_map import CLASSES, DOCUMENTED

Verdict = Literal["confirmed", "contradicted", "undecided"]
Found = Mapping[str, Mapping[str, int]]
"""How often each format was seen, by class of the precision map."""

FP8 = {"e4m3", "e5m2"}
FORWARD = ("norm.reduction", "router.softmax", "loss.reduction", "scores.output")
"""What else than the attention's softmax is computed in a forward outside FP8 products."""
BACKWARD = ("gradient.stream", "gradient.weight", "gradient.buffer", "gradient.wire", "product.gradient")
OPTIMIZER = ("master", "gain.master", "moment", "clipping.norm")


@dataclass(frozen=True)
class AuditClaim:
    """id: the claim's number. finding: in one line. verdict: of this run alone."""

    id: str
    finding: str
    verdict: Verdict


def answers(found: Found) -> list[AuditClaim]:
    """The verdict of one audit on each claim that an audit can answer."""
    return [_leaves_as_bf16(found), _rows(found), _uniform(found), _only_softmax(found), _recipe(found)]


def _leaves_as_bf16(found: Found) -> AuditClaim:
    """002-15: FP8 is a decision of kernels; results leave as BF16."""
    if not FP8 & _seen(found, "product.activation") or not _seen(found, "product.output"):
        return AuditClaim("002-15", "no FP8 product was seen", "undecided")
    outputs = _seen(found, "product.output", "experts.output", "attention.output", "norm.output", "residual")
    finding = f"products take {_said(found, 'product.activation')}, and what leaves modules is {_list(outputs)}"
    return AuditClaim("002-15", finding, "confirmed" if outputs == {"bf16"} else "contradicted")


def _rows(found: Found) -> AuditClaim:
    """002-16: the twelve rows of the map."""
    otherwise, unseen = [], []
    for row in DOCUMENTED:
        classes = [each for each in CLASSES if each.row == row and each.document]
        seen = [each for each in classes if found.get(each.key)]
        if not seen:
            unseen.append(row)
        otherwise += [
            f"{each.tensors}: {_said(found, each.key)} in place of {each.document}"
            for each in seen
            if set(found[each.key]) != {each.document}
        ]
    if unseen:
        return AuditClaim("002-16", f"nothing was seen of {', '.join(unseen)}", "undecided")
    if otherwise:
        return AuditClaim("002-16", "; ".join(otherwise), "contradicted")
    return AuditClaim("002-16", "all twelve rows are as the map says", "confirmed")


def _uniform(found: Found) -> AuditClaim:
    """002-17: backward and optimizer are uniformly FP32."""
    seen = {key: _seen(found, key) for key in (*BACKWARD, *OPTIMIZER)}
    if not all(seen.values()):
        return AuditClaim(
            "002-17", f"not seen: {', '.join(key for key, formats in seen.items() if not formats)}", "undecided"
        )
    others = [f"{key} {_list(formats)}" for key, formats in seen.items() if formats != {"fp32"}]
    if others:
        return AuditClaim("002-17", f"not FP32: {', '.join(others)}", "contradicted")
    return AuditClaim("002-17", "gradients, buffers, masters and moments are FP32", "confirmed")


def _only_softmax(found: Found) -> AuditClaim:
    """002-18: softmax is the only op of the forward that escapes to FP32."""
    if not _seen(found, "softmax.reduction"):
        return AuditClaim("002-18", "no softmax was seen", "undecided")
    others = [key for key in FORWARD if "fp32" in _seen(found, key)]
    if others:
        return AuditClaim("002-18", f"FP32 too: {', '.join(others)}", "contradicted")
    return AuditClaim("002-18", "nothing else of the forward was seen in FP32", "confirmed")


def _recipe(found: Found) -> AuditClaim:
    """002-19: RMSNorm and softmax reduce in FP32, AdamW updates FP32 masters, from which BF16 shadows are made."""
    fp32 = ("norm.reduction", "softmax.reduction", "master", "gain.master", "moment")
    wanted = {key: {"fp32"} for key in fp32} | {"gain.weight": {"bf16"}, "product.shadow": {"bf16"}}
    unseen = [key for key in wanted if not _seen(found, key)]
    if unseen:
        return AuditClaim("002-19", f"not seen: {', '.join(unseen)}", "undecided")
    otherwise = [f"{key} {_said(found, key)}" for key, formats in wanted.items() if _seen(found, key) != formats]
    if otherwise:
        return AuditClaim("002-19", f"otherwise: {', '.join(otherwise)}", "contradicted")
    return AuditClaim(
        "002-19", "reductions, masters and moments are FP32, and weights of the forward BF16", "confirmed"
    )


def _seen(found: Found, *keys: str) -> set[str]:
    return {form for key in keys for form in found.get(key, {})}


def _said(found: Found, key: str) -> str:
    return _list(_seen(found, key))


def _list(formats: set[str]) -> str:
    return " and ".join(sorted(formats))
