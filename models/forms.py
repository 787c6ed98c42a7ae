"""The forms of ops: what each reads and writes, and the function with which both sides compute it in exact mode.

Each side has one table, by form, of how its module of a form is called and what is seen of the call:
`rollout.plugin.forms` and `trainer.step.op_trace`. An architecture with a form of its own writes the form beside its
ops, and enters it in both tables where its modules are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fp8rl.numerics import ops

Part = Literal["embedding", "router", "attention", "experts", "norm"]


@dataclass(frozen=True, kw_only=True)
class OpForm:
    """One form of op.

    Attributes:
        shapes: of what it reads and writes; T tokens of some sequences, end to end.
        definition: what both sides compute it with in exact mode, `ops.fp8_linear` in place of `ops.linear` where a
            product is quantized; None where nothing is computed.
        compared: how many of the values that it writes are compared, the first ones; None for all.
        constants: names of constants in it, which both sides report.
        part: what a module that computes it is to the precision map, whatever else it computes; None for what is a
            part of a product or of nothing.
    """

    name: str
    shapes: str
    definition: Callable[..., Any] | None
    compared: int | None = None
    constants: tuple[str, ...] = ()
    part: Part | None = None

    @property
    def defined_by(self) -> str:
        """Dotted name of its definition."""
        return "" if self.definition is None else f"{self.definition.__module__}.{self.definition.__name__}"


_EPS, _THETA, _YARN = "norm_eps", "rope_theta", "the factor of YaRN"

EMBED = OpForm(name="embed", shapes="tokens int64 [T] -> [T, H]", definition=None, part="embedding")
NORM = OpForm(name="norm", shapes="[T, H] -> [T, H]", definition=ops.rms_norm, constants=(_EPS,), part="norm")
ADD_NORM = OpForm(
    name="add_norm",
    shapes="x, residual [T, H] -> normed, and the sum that was normed; the first of a model has no residual",
    definition=ops.add_rms_norm,
    constants=(_EPS,),
    part="norm",
)
HEAD_NORM = OpForm(
    name="head_norm", shapes="[T, heads, D] -> the same", definition=ops.rms_norm, constants=(_EPS,), part="norm"
)
HEADS_NORM = OpForm(
    name="heads_norm",
    shapes="[T, heads, D] -> the same, normed over all heads of a token together",
    definition=ops.rms_norm,
    constants=(_EPS,),
    part="norm",
)
QKV = OpForm(
    name="qkv",
    shapes="[T, H] -> q [T, heads, D], k and v [T, kv heads, D]; with `ops.add_bias` behind it where there are biases",
    definition=ops.linear,
)
ROPE = OpForm(name="rope", shapes="q, k -> q, k", definition=ops.rope, constants=(_THETA,))
ATTENTION = OpForm(name="attention", shapes="q, k, v -> [T, heads * D]", definition=ops.attention, part="attention")
LATENT_DOWN = OpForm(
    name="latent_down",
    shapes="[T, H] -> the narrow rows of queries [T, q rank], and of keys and values [T, kv rank + rope]",
    definition=ops.linear,
)
LATENT_ATTENTION = OpForm(
    name="latent_attention",
    shapes="q [T, heads, D] and rows [T, kv rank + rope], neither rotated -> [T, heads * value]: the rows' norm, "
    "`ops.rope_pairs`, `ops.head_linear` into the latents and out of them, and the attention between",
    definition=ops.latent_attention,
    constants=(_THETA, _YARN),
    part="attention",
)
LINEAR = OpForm(
    name="linear", shapes="[T, K] -> [T, N]; a router's product too, whose module is the router", definition=ops.linear
)
SWIGLU = OpForm(name="swiglu", shapes="[T, 2F] -> [T, F]", definition=ops.swiglu)
ROUTER = OpForm(name="router", shapes="[T, H] -> logits FP32 [T, E], not rounded", definition=ops.linear_partial)
TOPK = OpForm(
    name="topk",
    shapes="logits [T, E] -> probabilities FP32 [T, E], 0 for experts not chosen; chosen int64 [T, k], ascending",
    definition=ops.route,
    compared=1,  # the probabilities say the choice
    part="router",
)
SIGMOID_TOPK = OpForm(
    name="sigmoid_topk",
    shapes="as topk, for experts that are chosen by sigmoid + bias",
    definition=ops.route_sigmoid,
    compared=1,
    part="router",
)
EXPERTS = OpForm(
    name="experts",
    shapes="x [T, H], probabilities, chosen -> [T, H]; recorded too: `each` [T, k, H], one expert's share of it",
    definition=ops.experts,
    part="experts",
)
EXPERTS_AND_SHARED = OpForm(
    name="experts_and_shared",
    shapes="x [T, H], probabilities, chosen, output of shared experts [T, H] -> the sum [T, H]; `each` as of experts",
    definition=ops.experts,
    part="experts",
)
LOGPROBS = OpForm(
    name="logprobs",
    shapes="logits [T, V] -> FP32 [T], of the sequence's next token",
    definition=ops.token_logprobs,
)
