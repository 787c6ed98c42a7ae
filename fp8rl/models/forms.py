"""Forms of ops: what each reads and writes, and the function with which both sides compute it in exact mode.

Here are those of all families; a family has its own beside its ops. The family's files in the trainer and in the engine
say how their modules of a form are called and what is seen of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fp8rl.numerics import ops

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
