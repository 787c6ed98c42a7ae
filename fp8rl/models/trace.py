"""The forward of a model as a sequence of ops, and recordings of what goes into each and what comes out.

The forward is a small program over named values: each op reads some and writes some, which are there for the ops behind
it. The trainer records what its ops put out; the engine runs its own ops on the same inputs, and, each on what its own
op before it put out, the whole program. A recording is a flat mapping from `site:in.name` and `site:out.name` to
tensors whose first axis is the tokens [T] of some sequences, end to end; besides, it holds TARGETS and LENGTHS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fp8rl.numerics import ops

TOKENS, TARGETS, LENGTHS = "tokens", "targets", "lengths"
"""There before the first op: int64 [T], each token's next one (0 behind a sequence's last), and int64 [sequences]."""
RESIDUAL, CHOSEN, LOGITS = "residual", "chosen", "logits"
"""Values that others than the ops look at: the residual stream, a token's experts, and what comes out at the end."""
EACH = "each"
"""What is recorded of an op with experts beside its output."""


# Forms of ops: what each reads and writes, and the function with which both sides compute it in exact mode. Here are
# those of all families; a family has its own beside its ops. The family's files in the trainer and in the engine say
# how their modules of a form are called and what is seen of the call.

Part = Literal["embedding", "router", "attention", "experts", "gate", "norm"]


@dataclass(frozen=True, kw_only=True)
class OpForm:
    """One form of op."""

    name: str
    shapes: str
    """The shapes of its inputs and outputs; T tokens of some sequences, end to end."""
    definition: Callable[..., Any] | None
    """The function by which both sides compute it in exact mode, `ops.fp8_linear` in place of `ops.linear` where a
    product is quantized; None where nothing is computed."""
    compared: int | None = None
    """The number of its outputs that are compared, the first ones; None: all."""
    constants: tuple[str, ...] = ()
    """Names of constants in it, which both sides report."""
    part: Part | None = None
    """The row of the precision map for a module that computes it; None: it is part of a product, or has no row."""

    @property
    def defined_by(self) -> str:
        """Dotted name of its definition."""
        return "" if self.definition is None else f"{self.definition.__module__}.{self.definition.__name__}"


EPS, THETA, ROPE_FACTOR = "norm_eps", "rope_theta", "the factor of the rope scaling"
"""Constants that several forms have."""

EMBED = OpForm(name="embed", shapes="tokens int64 [T] -> [T, H]", definition=None, part="embedding")
NORM = OpForm(name="norm", shapes="[T, H] -> [T, H]", definition=ops.rms_norm, constants=(EPS,), part="norm")
ADD_NORM = OpForm(
    name="add_norm",
    shapes="x, residual [T, H] -> normed, and the sum that was normed; the first of a model has no residual",
    definition=ops.add_rms_norm,
    constants=(EPS,),
    part="norm",
)
LINEAR = OpForm(
    name="linear", shapes="[T, K] -> [T, N]; a router's product too, whose module is the router", definition=ops.linear
)
LOGPROBS = OpForm(
    name="logprobs", shapes="logits [T, V] -> FP32 [T], of the sequence's next token", definition=ops.token_logprobs
)


@dataclass(frozen=True)
class Op:
    """One op of the forward."""

    name: str
    form: OpForm
    reads: tuple[str, ...]
    writes: tuple[str, ...]
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
