"""Two recordings of the same ops against each other: by op, by expert, by position. Pure functions on tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fp8rl.diagnose.attribution.result import ExpertDifference, OpDifference, PositionDifference
from fp8rl.models.trace import CHOSEN, EACH, RESIDUAL, Forward, output

SHORTEST_BUCKET = 32


Tensors = Mapping[str, Tensor]


def op_differences(forward: Forward, trainer: Tensors, engine: Tensors) -> list[OpDifference]:
    """Every op of the trainer's recording against the engine's answer to it, in the order of the forward pass."""
    found = []
    for place in forward.places():
        ours, theirs = (output(side, place) for side in (trainer, engine))
        difference = _difference(ours, theirs)
        differing = (difference != 0).double().mean().item()
        largest = difference.abs().max().item() if difference.numel() else 0.0
        found.append(OpDifference(place.layer, place.op.name, differing, relative_rms(ours, theirs), largest))
    return found


def relative_rms(ours: Tensor, theirs: Tensor) -> float:
    """||ours - theirs|| / ||ours|| over all elements, in float64; infinite if the difference is not finite."""
    difference = float(_difference(ours, theirs).norm())
    if difference == 0:
        return 0.0
    norm = float(ours.double().norm())
    return difference / norm if math.isfinite(difference) and norm > 0 else math.inf


def stream_differences(forward: Forward, trainer: Tensors, engine: Tensors) -> list[float]:
    """How far the residual stream of the engine's own forward is from the trainer's, by layer: relative RMS."""
    streams: dict[int, Tensor] = {}  # as it goes into the layer: later ops of it write another
    for place in forward.places():
        if place.layer is not None and RESIDUAL in place.op.writes:
            streams.setdefault(place.layer, trainer[place.key(f"out.{RESIDUAL}")])
    return [relative_rms(ours, theirs) for ours, theirs in zip(streams.values(), engine["free.stream"], strict=True)]


def expert_differences(
    forward: Forward, trainer: Tensors, engine: Tensors, abs_d: Tensor, used: Tensor
) -> list[ExpertDifference]:
    """Every expert of every layer, by the trainer's routing.

    abs_d: float64 [T], |d| of each token's next one. used: bool [T], whether it counts.
    """
    found = []
    for place in forward.places():
        if place.layer is None or place.key(EACH) not in trainer:
            continue
        chosen = trainer[place.key(f"in.{CHOSEN}")]
        ours, theirs = trainer[place.key(EACH)], engine[place.key(EACH)]
        for expert in range(trainer[place.key("in.probs")].shape[1]):
            here = chosen == expert
            routed = here.any(1)
            found.append(
                ExpertDifference(
                    layer=place.layer,
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
    """The difference in float64; 0 where both are the same, not finite included."""
    ours, theirs = ours.double(), theirs.double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return torch.where(same, 0.0, ours - theirs)
