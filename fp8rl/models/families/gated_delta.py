"""Linear attention by the gated delta rule (`numerics.ops.gated_delta`): a state of constant size in place of a cache.

A layer has a product into queries, keys, values and the gates z of its output; a product into the gates a and b of its
state; a short convolution over queries, keys and values; the rule; a norm with the gates z; and the projection out.
The product of a and b, the convolution, `A_log`, `dt_bias` and norms are never quantized; `A_log`, `dt_bias` and the
norm with the gates are in FP32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8rl.models.families import Activations, Family, PartNames, Widths, norm_before
from fp8rl.models.program import ADD_NORM, EPS, LINEAR, Host, Op, OpForm, OpSite
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics import ops

IN_FP32: dict[str, Any] = {"served": torch.float32, "trained": torch.float32}
"""Arguments for the row of a vector that checkpoints have in FP32 or BF16 and both sides hold in FP32."""
STATE_BYTES, CONV_BYTES = 4, 2
"""Bytes of a number in a request's states, and in the rows that a request keeps for its convolutions."""


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """The sizes of linear attention."""

    layers: Collection[int]
    """The layers with linear attention, counted from 0; all others have attention."""
    key_heads: int
    """Number of heads of queries and keys. Each serves equally many heads of values."""
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """Number of tokens that the convolution reads, including the token itself."""
    joined: bool
    """True: the checkpoint has a matrix for queries, keys, values and z, and a matrix for b and a, both ordered by key
    heads (Qwen3-Next). False: it has a matrix for queries, keys and values, and one each for z, b and a (Qwen3.5)."""

    @property
    def keys(self) -> int:
        """Width of the keys of all heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of the values of all heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads, in this order."""
        return 2 * self.keys + self.values

    @property
    def shares(self) -> int:
        """Number of heads of values that share a head of keys."""
        return self.value_heads // self.key_heads

    @property
    def of_head(self) -> tuple[int, int, int]:
        """Widths of the query, the key and the values of one head of keys."""
        return self.key_dim, self.key_dim, self.shares * self.value_dim

    @property
    def state(self) -> int:
        """The number of elements of a request's state in one layer."""
        return self.value_heads * self.key_dim * self.value_dim


def _of_head(sizes: ModelSizes) -> tuple[int, int, int]:
    return sizes.of(GatedDelta).of_head


def _in_proj(host: Host, site: OpSite, x: Tensor, rows: Any = None) -> Sequence[Tensor]:
    """Return the convolution's channels (in the order of `Host.joined`) and z, both of this rank's heads only."""
    own, found = host.sizes.of(GatedDelta), host.products(site, x, rows)
    if len(found) == 2:
        return found
    widths = *own.of_head, own.shares * own.value_dim
    *channels, z = found[0].unflatten(-1, (-1, sum(widths))).split(widths, -1)
    return host.joined(channels), z.flatten(-2)


def _gates(host: Host, site: OpSite, x: Tensor) -> Sequence[Tensor]:
    own, found = host.sizes.of(GatedDelta), host.products(site, x)
    if len(found) == 2:
        return found
    b, a = (gate.flatten(-2) for gate in found[0].unflatten(-1, (-1, 2, own.shares)).unbind(-2))
    return b, a


def _conv(host: Host, site: OpSite, qkv: Tensor) -> Sequence[Tensor]:
    return (host.convolve(site, host.in_rows(qkv), host.tensor(site).flatten(1)),)


def _delta(host: Host, site: OpSite, qkv: Tensor, b: Tensor, a: Tensor) -> Sequence[Tensor]:
    own, b, a = host.sizes.of(GatedDelta), host.in_rows(b), host.in_rows(a)
    q, k, v = host.apart(qkv, own.of_head)
    g, beta = ops.delta_gates(a, b, host.tensor(site, "A_log"), host.tensor(site, "dt_bias"))
    v = v.unflatten(-1, (own.shares, -1)).flatten(-3, -2)
    return (host.recur(site, q, k, v, g, beta).flatten(-2),)


def _gated_norm(host: Host, site: OpSite, x: Tensor, z: Tensor) -> Sequence[Tensor]:
    weight, eps = host.tensor(site), host.sizes.norm_eps

    def normed(*values: Tensor) -> Tensor:
        heads, gates = (value.unflatten(-1, (-1, len(weight))) for value in values)
        return ops.gated_rms_norm(heads, gates, weight, eps).flatten(-2)

    return (host.by_rows(normed, x, z),)


IN_PROJ = OpForm(
    name="delta_in_proj",
    shapes="[T, H] -> queries, keys and values of all heads [T, C], and z [T, heads * value]",
    channels=_of_head,
    compute=_in_proj,
    takes_rows=True,
)
GATES = OpForm(name="delta_gates", shapes="[T, H] -> b and a [T, heads]", compute=_gates)
CONV = OpForm(name="short_conv", shapes="[T, C] -> [T, C]", across_tokens=True, channels=_of_head, compute=_conv)
DELTA = OpForm(
    name="gated_delta",
    shapes="queries, keys and values [T, C], b, a [T, heads] -> [T, heads * value]: `ops.delta_gates`, and the rule",
    across_tokens=True,
    compute=_delta,
    formats=dict.fromkeys(("gain.weight", "gradient.weight"), "bf16|fp32") | {"wire.weights": "bf16|fp32|{gather}"},
)
GATED_NORM = OpForm(
    name="gated_norm",
    shapes="[T, heads * value], z -> the same, normed over each head",
    constants=(EPS,),
    part="norm",
    compute=_gated_norm,
)

OPS = (
    Op("input_norm", ADD_NORM, ("x", "residual"), ("x", "residual"), "input_layernorm"),
    Op("in_proj", IN_PROJ, ("x",), ("qkv", "z"), "self_attention.in_proj"),
    Op("gates", GATES, ("x",), ("b", "a"), "self_attention.gate_proj"),
    Op("conv", CONV, ("qkv",), ("qkv",), "self_attention.conv1d"),
    Op("delta", DELTA, ("qkv", "b", "a"), ("x",), "self_attention.core_attention"),
    Op("gated_norm", GATED_NORM, ("x", "z"), ("x",), "self_attention.out_norm"),
    Op("out_proj", LINEAR, ("x",), ("x",), "self_attention.out_proj"),
)


def gated_delta_tensors(sizes: ModelSizes, layer: int) -> Iterator[TensorRow]:
    """Yield the rows of a layer. Megatron orders the matrices of both products by key heads, so that each rank takes
    consecutive whole heads. Checkpoints have this order only if they are `joined`."""
    own, hidden = sizes.of(GatedDelta), sizes.hidden_size
    at, parts = PartNames.of(layer, "linear_attn.", "self_attention."), (own.keys, own.keys, own.values)
    by_head: dict[str, Any] = {"layout": "heads", "groups": own.key_heads}
    into: dict[str, Any] = {"op": "in_proj", "engine": "in_proj_qkvz", "split": 0, "megatron": "in_proj"}
    gates: dict[str, Any] = {"op": "gates", "engine": "in_proj_ba", "split": 0, "megatron": "gate_proj", "small": True}
    yield norm_before("input", sizes, layer, "input_layernorm.weight")
    if own.joined:
        yield at.product("in_proj_qkvz", (2 * (own.keys + own.values), hidden), kind="in_proj_qkvz", **into)
        yield at.product("in_proj_ba", (2 * own.value_heads, hidden), **gates)
    else:
        yield at.product("in_proj_qkv", (own.channels, hidden), kind="in_proj_qkv", parts=parts, **into, **by_head)
        yield at.product("in_proj_z", (own.values, hidden), kind="in_proj_z", **into, **by_head)
        for name in ("in_proj_b", "in_proj_a"):
            yield at.product(name, (own.value_heads, hidden), **gates, **by_head)
    conv, shape = "conv1d.weight", (own.channels, 1, own.taps)
    yield at.tensor(conv, shape, op="conv", split=0, megatron=conv, parts=parts, **by_head)
    for name in ("A_log", "dt_bias"):
        yield at.tensor(name, (own.value_heads,), op="delta", split=0, megatron=name, **IN_FP32)
    yield at.norm("norm", own.value_dim, op="gated_norm", megatron="out_norm.weight", **IN_FP32)
    yield at.product("out_proj", (hidden, own.values), op="out_proj", kind="out_proj", split=1, megatron="out_proj")


def _activations(sizes: ModelSizes) -> Activations:
    """Return the activations in bytes, with the hidden size H, C channels, V the width of all values and h heads of
    values: 8H for both norms and residuals, 2(C + V) + 4h for the products, 2C for the convolution, 8h for decays and
    beta, 2V for the rule, 2V for the gated norm. The recomputed core begins with the convolution and ends before the
    gated norm."""
    own = sizes.of(GatedDelta)
    core = 2 * own.channels + 8 * own.value_heads + 2 * own.values
    return Activations(
        bf16=8 * sizes.hidden_size + 2 * (own.channels + own.values) + 4 * own.value_heads + core + 2 * own.values,
        fp8=1.03 * own.values - 0.97 * sizes.hidden_size,
        core=float(core),
    )


def _widths(sizes: ModelSizes) -> Widths:
    own = sizes.of(GatedDelta)
    return Widths(
        split={
            "linear_num_key_heads * linear_key_head_dim": own.keys,
            "linear_num_value_heads * linear_value_head_dim": own.values,
        }
    )


def _widths_apart(sizes: ModelSizes) -> Widths:
    """Return the widths. Heads are reordered for Megatron, so each head must fill whole blocks."""
    own = sizes.of(GatedDelta)
    values = "linear_value_head_dim * linear_num_value_heads / linear_num_key_heads"
    return Widths({"linear_key_head_dim": own.key_dim, values: own.shares * own.value_dim})


def _held(sizes: ModelSizes, ranks: int) -> int:
    own = sizes.of(GatedDelta)
    return (STATE_BYTES * own.state + CONV_BYTES * (own.taps - 1) * own.channels) // ranks


def _recurrent(sizes: ModelSizes) -> int:
    """Return 7 FLOPs for each element of the state (decay, correction, sums with key and query), and 2 for each tap."""
    own = sizes.of(GatedDelta)
    return 7 * own.state + 2 * own.taps * own.channels


JOINED = Family(
    name="gated_delta",
    part="attention",
    kinds=(("in_proj_qkvz",), ("out_proj",)),
    tensors=gated_delta_tensors,
    ops=lambda sizes: OPS,
    activations=_activations,
    widths=_widths,
    within=lambda sizes, layer: layer in sizes.of(GatedDelta).layers,
    held=_held,
    recurrent=_recurrent,
    divided=lambda sizes: {"linear_num_key_heads": sizes.of(GatedDelta).key_heads},
    unshared=lambda sizes: {
        "context": "with linear attention, whose state goes from token to token: ranks cannot share a row yet"
    },
)
APART = replace(JOINED, kinds=(("in_proj_qkv", "in_proj_z"), ("out_proj",)), widths=_widths_apart)
