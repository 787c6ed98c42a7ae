"""Lowers a program for speed: neighbouring ops become one op, and norms quantize their own result.

A GPU needs one launch for such an op. The program before lowering gives the same bits, and recorders run it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from fp8rl.models.architecture import Model
from fp8rl.models.program import ADD_NORM, NORM_ROWS, ROWS, Forward, Fusion, Op
from fp8rl.numerics.spec import QuantSpec


def lowered(definition: Model, spec: QuantSpec) -> Forward:
    """Lower the program of a model whose products are quantized by `spec`."""
    layers = []
    for index, layer in enumerate(definition.forward.layers):
        for fusion in (fusion for family in definition.architecture.families for fusion in family.fusions):
            layer = fuse(layer, fusion)
        if spec.quantized:
            rows = definition.tensors.in_layer[index]
            quantized = {row.op for row in rows if row.product and definition.quantizes(row, spec)}
            layer = with_rows(layer, {op.name for op in layer if op.form.takes_rows and op.name in quantized})
        layers.append(layer)
    return replace(definition.forward, layers=tuple(layers))


def fuse(ops: Sequence[Op], fusion: Fusion) -> tuple[Op, ...]:
    """Replace the ops of a layer that the fusion names by one op."""
    for first in range(len(ops)):
        some = ops[first : first + len(fusion.forms)]
        if tuple(op.form for op in some) == fusion.forms:
            reads: dict[str, None] = {}
            made: set[str] = set()
            for op in some:
                reads |= dict.fromkeys(name for name in op.reads if name not in made)
                made |= {*op.writes}
            fused = replace(some[-1], form=fusion.fused, reads=tuple(reads))
            return (*ops[:first], fused, *ops[first + len(some) :])
    return tuple(ops)


def with_rows(ops: Sequence[Op], takes: Container[str]) -> tuple[Op, ...]:
    """Let norms of the residual stream quantize their result for the later ops that are named in `takes`."""
    found = list(ops)
    for place, norm in enumerate(ops):
        if norm.form is not ADD_NORM:
            continue
        value, readers = norm.writes[0], []
        for later in range(place + 1, len(ops)):
            if value in ops[later].reads and ops[later].name in takes:
                readers.append(later)
            if value in ops[later].writes:
                break
        if readers:
            found[place] = replace(norm, form=NORM_ROWS, writes=(*norm.writes, value + ROWS))
        for reader in readers:
            found[reader] = replace(found[reader], reads=(*found[reader].reads, value + ROWS))
    return tuple(found)
