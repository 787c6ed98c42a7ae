"""The forward of a model as a sequence of ops, and recordings of what goes into each and what comes out.

The forward is a small program over named values: each op reads some values and writes some, which later ops may read.
The trainer records the inputs and outputs of its ops. The engine runs its own ops on these inputs, and then the whole
program on its own outputs. A recording is a flat mapping from `site:in.name` and `site:out.name` to tensors whose first
axis is the tokens [T] of some sequences, end to end. It also holds TARGETS and LENGTHS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fp8rl.numerics import ops

TOKENS, TARGETS, LENGTHS = "tokens", "targets", "lengths"
"""Values before the first op, int64: tokens [T]; the token after each [T], 0 at a sequence end; lengths [sequences]."""
RESIDUAL, CHOSEN, LOGITS = "residual", "chosen", "logits"
"""Values that are also read outside the ops: the residual stream, each token's experts, and the logits."""
EACH = "each"
"""The name of what is recorded of an op with experts in addition to its output."""


# Forms of ops: what each reads and writes, and the function with which both sides compute it in exact mode. Here are
# those of all families; a family has its own beside its ops. The family's files in the trainer and in the engine say
# how their modules of a form are called and what is seen of the call.

Part = Literal["embedding", "router", "attention", "experts", "gate", "norm"]


@dataclass(frozen=True, kw_only=True)
class OpForm:
    """A form of op, such as a product or a norm, which several ops of a model have."""

    name: str
    shapes: str
    """The shapes of inputs and outputs. T is the number of tokens of some sequences, end to end."""
    definition: Callable[..., Any] | None
    """The function by which both sides compute it in exact mode, `ops.fp8_linear` in place of `ops.linear` where a
    product is quantized; None where nothing is computed."""
    compared: int | None = None
    """The number of leading outputs that are compared; None: all."""
    constants: tuple[str, ...] = ()
    """Names of constants of the op, which both sides report."""
    part: Part | None = None
    """The row of the precision map for a module that computes the op; None: it is part of a product, or has no row."""

    @property
    def defined_by(self) -> str:
        """The dotted name of the definition."""
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
    """The dotted path of the op's module in the engine's layer, or, outside the layers, in the engine's whole model."""
    megatron: str = ""
    """The dotted path of the op's module in Megatron. If a linear module contains a norm, or attention contains rope,
    it is the path of the containing module."""

    @property
    def compared(self) -> tuple[str, ...]:
        """Names of the written values that are compared."""
        return self.writes[: self.form.compared]


@dataclass(frozen=True)
class OpSite:
    layer: int | None
    """The layer; None outside the layers."""
    op: Op

    def key(self, name: str) -> str:
        """Return the key of a value in a recording, such as `layers.1.qkv:out.q` or `lm_head:out.logits`."""
        return f"{self.op.name}:{name}" if self.layer is None else f"layers.{self.layer}.{self.op.name}:{name}"


@dataclass(frozen=True)
class Forward:
    """The ops of a model in their order: before the layers, in each layer, after the layers."""

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
