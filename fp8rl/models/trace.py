"""Records the inputs and outputs of each op of a model's program.

The trainer records the inputs and outputs of its ops. The engine runs its own ops on these inputs, and then the whole
program on its own outputs. A recording is a flat mapping from `site:in.name` and `site:out.name` to tensors whose first
axis is the tokens [T] of some sequences, end to end. It also holds TARGETS and LENGTHS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.models.program import OpSite

TARGETS, LENGTHS = "targets", "lengths"
"""Further int64 values of a recording: the token after each token [T], 0 at a sequence's end; lengths [sequences]."""
EACH = "each"
"""The name under which each expert's term of a token's sum is recorded, in addition to the op's output."""


@dataclass(frozen=True)
class OpTrace:
    """A recording of the trainer's ops."""

    tensors: dict[str, Tensor]
    settings: dict[str, float]
    """Constants of the ops, such as `rope_theta`."""


def inputs(record: Mapping[str, Tensor], site: OpSite) -> list[Tensor | None]:
    """Return the inputs of an op, in the order of `reads`; None for a missing value, such as the first residual."""
    return [record.get(site.key(f"in.{name}")) for name in site.op.reads]


def output(record: Mapping[str, Tensor], site: OpSite) -> Tensor:
    """Return an op's compared outputs as one tensor [T, ...]."""
    parts = [record[site.key(f"out.{name}")] for name in site.op.compared]
    return torch.cat([part.reshape(len(part), -1) for part in parts], 1)


def recorded(site: OpSite, read: Sequence[Tensor | None], written: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return one op's entries in a recording. read, written: in the order of its `reads` and `writes`."""
    entries = {site.key(f"in.{name}"): tensor for name, tensor in zip(site.op.reads, read) if tensor is not None}
    return entries | {site.key(f"out.{name}"): tensor for name, tensor in zip(site.op.writes, written, strict=True)}
