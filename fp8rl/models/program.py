"""The program of a model: its forward pass as a sequence of ops over named values. Trainer and engine both run it.

Each op reads some values and writes some, which later ops may read. `OpForm.compute` is the code of a form of op, which
both sides run. It calls a `Host` for all that differs between the sides. An engine's host reads a paged cache, and a
trainer's host reads the rows of a batch. A lowered program (`models.lowering`) runs neighbouring ops as one op.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.backend import dispatch

if TYPE_CHECKING:
    from fp8rl.models.sizes import ModelSizes
    from fp8rl.numerics.kv import KVFormat
    from fp8rl.numerics.ops import HeadNorms
    from fp8rl.numerics.spec import QuantSpec

TOKENS = "tokens"
"""The value before the first op, int64 [T]."""
RESIDUAL, CHOSEN, LOGITS = "residual", "chosen", "logits"
"""Values that are also read outside the ops: the residual stream, each token's experts, and the logits."""


@dataclass(frozen=True, kw_only=True)
class OpForm:
    """A form of op, such as a product or a norm, which several ops of a model have."""

    name: str
    shapes: str
    """The shapes of inputs and outputs. T is the number of tokens of some sequences, end to end."""
    constants: tuple[str, ...] = ()
    """Names of constants of the op, which both sides report."""
    compute: Callable[..., Sequence[Any]]
    """The function that computes the outputs from a host, the site and the inputs."""
    takes_rows: bool = False
    """True if the op takes as a last input the rows that the norm before it has quantized."""
    across_tokens: bool = False
    """True if the op lets tokens of a sequence depend on each other. `recompute=attention` recomputes such ops."""
    channels: Callable[[ModelSizes], tuple[int, ...]] | None = None
    """Widths of a head's parts in the first output. `Host.joined` orders the parts. Recordings have all heads' first
    parts, then all heads' second parts, and so on. None: the order does not depend on the host."""
    part: Literal["embedding", "router", "attention", "experts", "gate", "norm"] | None = None
    """The row of the precision map for a module that computes the op; None: it is part of a product, or has no row."""
    formats: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Formats that differ from the precision map in models with the op, by key of the map."""


@dataclass(frozen=True)
class Op:
    """One op of the forward pass."""

    name: str
    form: OpForm
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    megatron: str = ""
    """The dotted path of the op's module in Megatron. If a linear module contains a norm, or attention contains rope,
    it is the path of the containing module."""


@dataclass(frozen=True)
class Fusion:
    """Forms of consecutive ops that may run as one op, which has the weights of all of them."""

    forms: tuple[OpForm, ...]
    fused: OpForm


@dataclass(frozen=True)
class OpSite:
    layer: int | None
    """The layer; None outside the layers."""
    op: Op

    def key(self, name: str) -> str:
        """Return the key of a value in a recording, such as `layers.1.qkv:q` or `lm_head:logits`."""
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


ROWS = ".rows"
"""The suffix that a value's name has in the name of its quantized rows."""


class Host(Protocol):
    """The side that runs the ops (trainer or engine), as ops call it. T: all sequences' tokens. A rank has only its
    heads and experts."""

    sizes: ModelSizes
    kv: KVFormat
    spec: QuantSpec

    def tensor(self, site: OpSite, name: str = "", of: str = "") -> Tensor:
        """Return a weight of the op that is no product's matrix. of: another op of the layer, to return its weight.
        name: the end of the weight's name, if the op has several."""

    def product(self, site: OpSite, x: Tensor, rows: Any = None) -> Tensor:
        """Return x's products with the op's matrices, end to end, plus biases. rows: x in FP8, of `ops.norm_rows`."""

    def products(self, site: OpSite, x: Tensor, rows: Any = None) -> Sequence[Tensor]:
        """Return the products with the op's matrices one by one; see `product`."""

    def product_of_heads(self, site: OpSite) -> Callable[..., Tensor]:
        """Return a function of x, first, count and transposed: `ops.head_linear` with the op's matrix."""

    def embed(self, site: OpSite, tokens: Tensor) -> Tensor: ...

    def logprobs(self, site: OpSite, logits: Tensor) -> Tensor: ...

    def whole(self, x: Tensor) -> Tensor:
        """Return x for all tokens. x: a value of this rank's tokens, if ranks split the sequence."""

    def over_heads(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Gather x [T, C] of all ranks' heads, apply a function, and return this rank's part of the result."""

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Join parts [T, heads, ...], each with some channels of every head, to one [T, C]. The trainer keeps a head's
        channels together; the engine puts all heads' channels of the first part first."""

    def apart(self, x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        """Undo `joined`. widths: the width of each part in a head."""

    def rotate(self, q: Tensor, k: Tensor, norms: HeadNorms | None = None) -> tuple[Tensor, Tensor]:
        """Compute `ops.rope_heads` at the tokens' positions."""

    def rotate_pairs(self, x: Tensor) -> Tensor: ...

    def attend(
        self, site: OpSite, q: Tensor, k: Tensor, v: Tensor, rotates: bool = False, norms: HeadNorms | None = None
    ) -> Tensor:
        """Return the attention of each token to its sequence, [T, heads * D]. rotates: first rotate q and k. norms:
        with `rotates`, the norms of q and k before it."""

    def attend_rows(self, site: OpSite, q: Tensor, rows: Tensor, rank: int) -> Tensor:
        """Return the attention of q [T, heads, D] to rows [T, D]. A row is a key; its first `rank` channels are the
        value."""

    def in_rows(self, x: Tensor) -> Tensor:
        """Reorder a value for `convolve` and `recur`, which go through each sequence token by token."""

    def by_rows(self, function: Callable[..., Tensor], *values: Tensor) -> Tensor:
        """Apply a function to values sequence by sequence, since a weight's gradient is summed in the values' order."""

    def convolve(self, site: OpSite, x: Tensor, weight: Tensor) -> Tensor:
        """Compute `ops.causal_conv`. x and the result have the order of `in_rows`."""

    def recur(self, site: OpSite, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Compute `ops.gated_delta_rule` of values in the order of `in_rows`. The result has the usual order again."""

    def choose(self, site: OpSite, route: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Choose each token's experts, or replay a choice. route: an op such as `ops.route`, with bound inputs."""

    def experts(self, site: OpSite, x: Tensor, probs: Tensor, chosen: Tensor, rows: Any = None) -> Tensor:
        """Compute `ops.routed_experts`."""


PROGRAM = "program"
"""The name under which a watcher gets an op of a program at `dispatch.place`: its host, what it read, what it wrote."""


def run(sites: Iterable[OpSite], host: Host, values: dict[str, Any]) -> dict[str, Any]:
    """Run ops in order, each on the values written before it, and return all values."""
    outside = dispatch.place
    for site in sites:
        op, dispatch.place = site.op, site
        read = [values.get(name) for name in op.reads]
        written = op.form.compute(host, site, *read)
        dispatch.note(PROGRAM, (host, read, written))
        values.update(zip(op.writes, written))
    dispatch.place = outside
    return values


TARGETS, LENGTHS, TEMPERATURE, EACH = "targets", "lengths", "temperature", "each"
"""Names in a recording, in addition to TOKENS, the constants, and `site:name` of the values that ops wrote. The token
after each token, int64 [T], 0 at a sequence's end; the sequences' lengths, int64; their temperature. `site:each` has
the terms of a token's experts, [T, k, H]. The tokens [T] of all sequences are end to end."""


class Trace:
    """Records the values that a program's ops write, while it watches them (`dispatch.watched`). names: of these values
    alone; None: all, and EACH."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self._parts: dict[str, list[Tensor]] = defaultdict(list)

    def recording(self) -> dict[str, Tensor]:
        """Return what was recorded so far. Values of several passes are end to end."""
        return {key: torch.cat(parts) for key, parts in self._parts.items()}

    def in_recording(self, site: OpSite, name: str, value: Any) -> Tensor:
        """Return a value as a recording has it, [T, ...]."""
        return value

    def __call__(self, op: str, given: Mapping[str, Any], made: Any) -> None:
        if op != PROGRAM:
            return
        site: OpSite = dispatch.place
        host, read, written = made
        values = {name: self.in_recording(site, name, value) for name, value in zip(site.op.writes, written)}
        if CHOSEN in site.op.reads and self._names is None:
            x, probs, chosen = read[:3]
            alone = torch.eye(chosen.shape[1], device=chosen.device)
            each = [host.experts(site, x, probs * only, chosen) for only in alone]
            values[EACH] = torch.stack([self.in_recording(site, EACH, term) for term in each], 1)
        for name, value in values.items():
            if self._names is None or name in self._names:
                self._parts[site.key(name)].append(value.detach().to("cpu", copy=True))


EPS, THETA, ROPE_FACTOR = "norm_eps", "rope_theta", "the factor of the rope scaling"
"""Names of constants that several forms have."""


def constants(sizes: ModelSizes) -> dict[str, float]:
    """Return the constants of the ops by name."""
    factor = 1.0 if sizes.rope_scaling is None else sizes.rope_scaling.factor
    return {EPS: sizes.norm_eps, THETA: sizes.rope_theta, ROPE_FACTOR: factor}


def norm_weight(host: Host, site: OpSite, of: str = "") -> Tensor:
    """Return the factor of a norm of the residual stream or of heads."""
    weight = host.tensor(site, of=of)
    return ops.one_plus(weight) if host.sizes.zero_centered_norms else weight


def _add_norm(host: Host, site: OpSite, x: Tensor, residual: Tensor | None) -> Sequence[Tensor]:
    weight, eps = norm_weight(host, site), host.sizes.norm_eps
    return (ops.rms_norm(x, weight, eps), x) if residual is None else ops.add_rms_norm(x, residual, weight, eps)


EMBED = OpForm(
    name="embed",
    shapes="tokens int64 [T] -> [T, H]",
    part="embedding",
    compute=lambda host, site, tokens: (host.embed(site, tokens),),
)
NORM = OpForm(
    name="norm",
    shapes="[T, H] -> [T, H]",
    constants=(EPS,),
    part="norm",
    compute=lambda host, site, x: (ops.rms_norm(x.contiguous(), norm_weight(host, site), host.sizes.norm_eps),),
)
ADD_NORM = OpForm(
    name="add_norm",
    shapes="x, residual [T, H] -> normed, and the sum that was normed; a model's first norm has no residual",
    constants=(EPS,),
    part="norm",
    compute=_add_norm,
)
NORM_ROWS = replace(
    ADD_NORM,
    name="norm_rows",
    compute=lambda host, site, x, residual: ops.norm_rows(
        x, residual, norm_weight(host, site), host.sizes.norm_eps, host.spec.activation
    ),
)
LINEAR = OpForm(
    name="linear",
    shapes="[T, K] -> [T, N]; a router's product too, whose module is the router",
    compute=lambda host, site, x, rows=None: (host.product(site, x, rows),),
    takes_rows=True,
)
LOGPROBS = OpForm(
    name="logprobs",
    shapes="logits [T, V] -> FP32 [T], of the sequence's next token",
    compute=lambda host, site, logits: (host.logprobs(site, logits),),
)
