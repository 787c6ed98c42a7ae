"""Grouped-query attention whose output is gated: each channel is multiplied by the sigmoid of its own gate.

`q_proj` has, for each head, the query and then the gate. SGLang's model has the family's parameters in the layer
itself, not in `self_attn`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fp8rl.models.families import Activations, attention
from fp8rl.models.program import Host, Op, OpForm, OpSite
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics import ops


def _gated_qkv(host: Host, site: OpSite, x: Tensor, rows: Any = None) -> Sequence[Tensor]:
    queries, k, v = (out.unflatten(-1, (-1, host.sizes.head_dim)) for out in host.products(site, x, rows))
    q, gate = queries.unflatten(-2, (-1, 2)).unbind(-2)
    return q, gate.flatten(-2), k, v


GATED_QKV = OpForm(
    name="gated_qkv",
    shapes="[T, H] -> q [T, heads, D], its gates [T, heads * D], k and v [T, kv heads, D]",
    compute=_gated_qkv,
    takes_rows=True,
)
OUTPUT_GATE = OpForm(
    name="output_gate",
    shapes="[T, heads * D], gates -> [T, heads * D]",
    compute=lambda host, site, x, gate: (ops.sigmoid_gate(x, gate),),
)


def gated_ops(sizes: ModelSizes) -> tuple[Op, ...]:
    input_norm, qkv, *between, o_proj = attention.attention_ops(sizes)
    gate = Op("gate", OUTPUT_GATE, ("x", "gate"), ("x",), "self_attention.linear_proj")
    qkv = replace(qkv, form=GATED_QKV, writes=("q", "gate", "k", "v"))
    return input_norm, qkv, *between, gate, o_proj


def gated_tensors(sizes: ModelSizes, layer: int) -> Iterator[TensorRow]:
    for row in attention.attention_tensors(sizes, layer):
        rows, *rest = row.shape
        wide = (2 * rows, *rest) if row.kind == "q_proj" else row.shape
        served = replace(row.engine, parameter=row.engine.parameter.replace(".self_attn.", "."))
        yield replace(row, shape=wide, engine=served)


def _activations(sizes: ModelSizes) -> Activations:
    """Return the activations of plain attention, of the gates, and of the result before the gates."""
    plain = attention.FAMILY.activations(sizes)
    return replace(plain, bf16=plain.bf16 + 4 * sizes.heads * sizes.head_dim)


FAMILY = replace(
    attention.FAMILY, name="gated_attention", tensors=gated_tensors, ops=gated_ops, activations=_activations
)
