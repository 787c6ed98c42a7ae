"""The forward of a model as a sequence of ops, and recordings of what goes into each and what comes out.

The forward is a small program over named values: each op reads some and writes some, which are there for the ops behind
it. The trainer records what its ops put out; the engine runs its own ops on the same inputs, and, each on what its own
op before it put out, the whole program. A recording is a flat mapping from `site:in.name` and `site:out.name` to
tensors whose first axis is the tokens [T] of some sequences, end to end; besides, it holds TARGETS and LENGTHS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.models.forms import OpForm

TOKENS, TARGETS, LENGTHS = "tokens", "targets", "lengths"
"""There before the first op: int64 [T], each token's next one (0 behind a sequence's last), and int64 [sequences]."""
RESIDUAL, CHOSEN, LOGITS, LOGPROBS = "residual", "chosen", "logits", "logprobs"
"""Values that others than the ops look at: the residual stream, a token's experts, and what comes out at the end."""
EACH = "each"
"""What is recorded of an op with experts beside its output."""


@dataclass(frozen=True)
class Op:
    """One op of the forward."""

    name: str
    form: OpForm
    reads: tuple[str, ...]
    """Names of its inputs."""
    writes: tuple[str, ...]
    """Names of its outputs."""
    engine: str = ""
    """Dotted path of its module in the engine's layer, or outside the layers in its whole model."""
    megatron: str = ""
    """The same in Megatron, where a norm may be inside a linear module, and rope inside the attention: the path is that
    module's."""

    @property
    def compared(self) -> tuple[str, ...]:
        """Names of the values in its output that are compared."""
        return self.writes[: self.form.compared]


@dataclass(frozen=True)
class OpSite:
    """An op in its layer."""

    layer: int | None
    """None outside the layers."""
    op: Op

    def key(self, name: str) -> str:
        """`layers.1.qkv:out.q`, `lm_head:out.logits`"""
        return f"{self.op.name}:{name}" if self.layer is None else f"layers.{self.layer}.{self.op.name}:{name}"


@dataclass(frozen=True)
class Forward:
    """The ops of a model in their order: before the layers, in each of them, behind them."""

    first: tuple[Op, ...]
    layers: tuple[tuple[Op, ...], ...]
    last: tuple[Op, ...]

    def sites(self) -> list[OpSite]:
        """Every op of the model."""
        return [
            *(OpSite(None, op) for op in self.first),
            *(OpSite(index, op) for index, ops in enumerate(self.layers) for op in ops),
            *(OpSite(None, op) for op in self.last),
        ]


@dataclass(frozen=True)
class OpTrace:
    """A recording of the trainer's ops."""

    tensors: dict[str, Tensor]
    settings: dict[str, float]
    """Constants of the ops, such as `rope_theta`."""


def inputs(record: Mapping[str, Tensor], site: OpSite) -> list[Tensor | None]:
    """Return what an op read, in the order of `reads`; None for what was not there, such as the first residual."""
    return [record.get(site.key(f"in.{name}")) for name in site.op.reads]


def output(record: Mapping[str, Tensor], site: OpSite) -> Tensor:
    """All of an op's output that is compared, [T, ...]."""
    parts = [record[site.key(f"out.{name}")] for name in site.op.compared]
    return torch.cat([part.reshape(len(part), -1) for part in parts], 1)


def recorded(site: OpSite, read: Sequence[Tensor | None], written: Sequence[Tensor]) -> dict[str, Tensor]:
    """The entries of one op in a recording: `read` in the order of its `reads`, `written` in that of its `writes`."""
    entries = {site.key(f"in.{name}"): tensor for name, tensor in zip(site.op.reads, read) if tensor is not None}
    return entries | {site.key(f"out.{name}"): tensor for name, tensor in zip(site.op.writes, written, strict=True)}
