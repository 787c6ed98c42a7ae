"""Two recordings of the same ops against each other: by op, by expert, by position. Pure functions on tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from numerics.traced_ops import key, places_in
from rl.diagnose.attribution.result import ExpertDifference, OpDifference, PositionDifference

SHORTEST_BUCKET = 32


def op_differences(trainer: Mapping[str, Tensor], engine: Mapping[str, Tensor]) -> list[OpDifference]:
    """Every op of the trainer's recording against the engine's answer to it, in the order of the forward pass."""
    found = []
    for layer, op in places_in(trainer):
        ours, theirs = (side[key((layer, op), "out")] for side in (trainer, engine))
        difference = _difference(ours, theirs)
        differing = (difference != 0).double().mean().item()
        largest = difference.abs().max().item() if difference.numel() else 0.0
        found.append(OpDifference(layer, op, differing, relative_rms(ours, theirs), largest))
    return found


def relative_rms(ours: Tensor, theirs: Tensor) -> float:
    """||ours - theirs|| / ||ours|| over all elements, in float64; infinite if the difference is not finite."""
    difference = float(_difference(ours, theirs).norm())
    if difference == 0:
        return 0.0
    norm = float(ours.double().norm())
    return difference / norm if math.isfinite(difference) and norm > 0 else math.inf


def stream_differences(trainer: Mapping[str, Tensor], engine: Mapping[str, Tensor]) -> list[float]:
    """By layer: how far the residual stream of the engine's own forward is from the trainer's, relative RMS."""
    inside = [place for place in places_in(trainer) if place[1] == "input_norm"]
    streams = [trainer[key(place, "out")][:, 1] for place in inside]
    return [relative_rms(ours, theirs) for ours, theirs in zip(streams, engine["free.stream"], strict=True)]


def expert_differences(
    trainer: Mapping[str, Tensor], engine: Mapping[str, Tensor], abs_d: Tensor, used: Tensor
) -> list[ExpertDifference]:
    """Every expert of every layer, by the trainer's routing.

    abs_d: float64 [T], |d| of each token's next one. used: bool [T], whether it counts.
    """
    found = []
    for layer, op in places_in(trainer):
        if op != "experts":
            continue
        place = (layer, op)
        chosen = trainer[key(place, "chosen")]
        ours, theirs = trainer[key(place, "each")], engine[key(place, "each")]
        assert layer is not None
        for expert in range(trainer[key(place, "probs")].shape[1]):
            here = chosen == expert
            routed = here.any(1)
            found.append(
                ExpertDifference(
                    layer=layer,
                    expert=expert,
                    tokens=int(routed.sum()),
                    relative_rms=relative_rms(ours[here], theirs[here]),
                    abs_diff_mean=_mean(abs_d[used & routed]),
                    abs_diff_rest=_mean(abs_d[used & ~routed]),
                )
            )
    return found


def position_differences(d: Tensor, mask: Tensor) -> list[PositionDifference]:
    """Mean |d| by position in the sequence, in buckets that double in length; d float [B, S], mask bool [B, S].

    Tokens whose d is not finite are left out, and so are buckets without tokens.
    """
    positions = torch.arange(d.shape[1]).expand_as(d)
    used = mask & d.isfinite()
    found = []
    start, stop = 0, SHORTEST_BUCKET
    while start < d.shape[1]:
        values = d[used & (positions >= start) & (positions < stop)].abs().double()
        if values.numel():
            found.append(PositionDifference(start, stop, values.numel(), values.mean().item()))
        start, stop = stop, 2 * stop
    return found


def _mean(values: Tensor) -> float:
    return values.mean().item() if values.numel() else math.nan


def _difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """In float64; 0 where both are the same, not finite included."""
    ours, theirs = ours.double(), theirs.double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return torch.where(same, 0.0, ours - theirs)
