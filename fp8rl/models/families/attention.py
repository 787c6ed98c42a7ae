"""Grouped-query attention: fused q, k and v, biases in some models, norms of heads, rotation, attention, projection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fp8rl.models.families import Family, PartNames, Widths, attention_activations, norm_before
from fp8rl.models.program import (
    ADD_NORM,
    EPS,
    LINEAR,
    ROPE_FACTOR,
    THETA,
    Fusion,
    Host,
    Op,
    OpForm,
    OpSite,
    norm_weight,
)
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics import ops


def _heads_norm(host: Host, site: OpSite, x: Tensor) -> Sequence[Tensor]:
    weight, eps = norm_weight(host, site), host.sizes.norm_eps
    return (host.over_heads(lambda heads: ops.rms_norm(heads, weight, eps), x.flatten(-2)).view(x.shape),)


def _normed_attention(host: Host, site: OpSite, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    queries, keys = (norm_weight(host, site, of) for of in ("q_norm", "k_norm"))
    return (host.attend(site, q, k, v, True, ops.HeadNorms(queries, keys, host.sizes.norm_eps)),)


HEAD_NORM = OpForm(
    name="head_norm",
    shapes="[T, heads, D] -> the same",
    constants=(EPS,),
    part="norm",
    compute=lambda host, site, x: (ops.rms_norm(x, norm_weight(host, site), host.sizes.norm_eps),),
)
HEADS_NORM = replace(
    HEAD_NORM,
    name="heads_norm",
    shapes="[T, heads, D] -> the same, normed over all heads of a token together",
    compute=_heads_norm,
)
QKV = OpForm(
    name="qkv",
    shapes="[T, H] -> q [T, heads, D], k and v [T, kv heads, D]; with `ops.add_bias` behind it where there are biases",
    compute=lambda host, site, x, rows=None: [
        out.unflatten(-1, (-1, host.sizes.head_dim)) for out in host.products(site, x, rows)
    ],
    takes_rows=True,
)
ROPE = OpForm(
    name="rope",
    shapes="q, k -> q, k",
    constants=(THETA, ROPE_FACTOR),
    compute=lambda host, site, q, k: host.rotate(q, k),
)
ATTENTION = OpForm(
    name="attention",
    shapes="q, k, v -> [T, heads * D]",
    part="attention",
    across_tokens=True,
    compute=lambda host, site, q, k, v: (host.attend(site, q, k, v),),
)
NORMED_ATTENTION = replace(ATTENTION, name="normed_attention", compute=_normed_attention)
"""Norms of heads, rotation, the write to the cache, and attention. `ops.rope_heads` does the first three at once."""
ROTATED_ATTENTION = replace(
    ATTENTION, name="rotated_attention", compute=lambda host, site, q, k, v: (host.attend(site, q, k, v, rotates=True),)
)
FUSIONS = (
    Fusion((HEAD_NORM, HEAD_NORM, ROPE, ATTENTION), NORMED_ATTENTION),
    Fusion((ROPE, ATTENTION), ROTATED_ATTENTION),
)
O_PROJ = Op("o_proj", LINEAR, ("x",), ("x",), "self_attention.linear_proj")
OPS = (
    Op("input_norm", ADD_NORM, ("x", "residual"), ("x", "residual"), "self_attention.linear_qkv"),
    Op("qkv", QKV, ("x",), ("q", "k", "v"), "self_attention.linear_qkv"),
    Op("q_norm", HEAD_NORM, ("q",), ("q",), "self_attention.q_layernorm"),
    Op("k_norm", HEAD_NORM, ("k",), ("k",), "self_attention.k_layernorm"),
    Op("rope", ROPE, ("q", "k"), ("q", "k"), "self_attention.core_attention"),
    Op("attention", ATTENTION, ("q", "k", "v"), ("x",), "self_attention.core_attention"),
    O_PROJ,
)
"""The ops of attention with a norm for each head of queries and keys."""


def attention_ops(sizes: ModelSizes) -> tuple[Op, ...]:
    if sizes.head_norms is None:
        return tuple(op for op in OPS if op.form is not HEAD_NORM)
    if sizes.head_norms == "together":
        return tuple(replace(op, form=HEADS_NORM) if op.form is HEAD_NORM else op for op in OPS)
    return OPS


def attention_tensors(sizes: ModelSizes, layer: int) -> Iterator[TensorRow]:
    hidden, head_dim, at = sizes.hidden_size, sizes.head_dim, PartNames.of(layer, "self_attn.", "self_attention.")
    kv_heads = sizes.kv_heads
    projections = (("q_proj", sizes.heads, None), ("k_proj", kv_heads, kv_heads), ("v_proj", kv_heads, kv_heads))
    of_qkv: dict[str, Any] = {"op": "qkv", "split": 0, "layout": "heads"}
    yield norm_before("input", sizes, layer, "self_attention.linear_qkv.layer_norm_weight")
    for name, heads, copied in projections:
        shape = heads * head_dim, hidden
        yield at.product(name, shape, kind=name, engine="qkv_proj", megatron="linear_qkv", kv_heads=copied, **of_qkv)
    if sizes.qkv_bias:
        of_qkv |= {"engine": "qkv_proj.bias", "megatron": "linear_qkv.bias"}
        for name, heads, copied in projections:
            yield at.tensor(f"{name}.bias", (heads * head_dim,), kv_heads=copied, **of_qkv)
    if sizes.head_norms is not None:
        together = sizes.head_norms == "together"
        for name, heads in (("q", sizes.heads), ("k", sizes.kv_heads)):
            path = f"{name}_layernorm.norm.weight" if together else f"{name}_layernorm.weight"
            yield at.norm(f"{name}_norm", head_dim * (heads if together else 1), op=f"{name}_norm", megatron=path)
    yield o_proj(sizes, at, head_dim)


def o_proj(sizes: ModelSizes, at: PartNames, value_dim: int) -> TensorRow:
    shape = sizes.hidden_size, sizes.heads * value_dim
    return at.product("o_proj", shape, op="o_proj", kind="o_proj", split=1, megatron="linear_proj")


def _widths(sizes: ModelSizes) -> Widths:
    """Return the widths. A head, or a group of `joined` heads, must fill whole blocks, since ranks do not split it."""
    name = "head_dim" if sizes.joined == 1 else f"{sizes.joined} * head_dim"
    return Widths({name: sizes.joined * sizes.head_dim})


_WHOLE_NORM = "that norms queries and keys over all heads: an engine's ranks do not share this norm"
FAMILY = Family(
    name="attention",
    part="attention",
    kinds=(("q_proj", "k_proj", "v_proj"), ("o_proj",)),
    tensors=attention_tensors,
    ops=attention_ops,
    activations=lambda sizes: attention_activations(sizes, sizes.head_dim),
    fusions=FUSIONS,
    widths=_widths,
    unshared=lambda sizes: {"engine": _WHOLE_NORM} if sizes.head_norms == "together" else {},
    cached=lambda sizes, ranks: 2 * sizes.head_dim * sizes.kv_heads // min(ranks, sizes.kv_heads),
    value=lambda sizes: sizes.head_dim,
    scored=lambda sizes: sizes.heads * 2 * sizes.head_dim,
)
