"""The lowering of a program: neighbouring ops in one, and norms that quantize their result, with the same bits.

A GPU takes one launch for such an op. A program that is not lowered is as right, and a recorder runs it so.
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
        for fusion in (each for family in definition.architecture.families for each in family.fusions):
            layer = fuse(layer, fusion)
        if spec.quantized:
            rows = [row for row in definition.tensors.rows.values() if row.layer == index and row.product]
            quantized = {row.op for row in rows if definition.quantizes(row, spec)}
            layer = with_rows(layer, {op.name for op in layer if op.form.takes_rows and op.name in quantized})
        layers.append(layer)
    return replace(definition.forward, layers=tuple(layers))


def fuse(ops: Sequence[Op], fusion: Fusion) -> tuple[Op, ...]:
    """Run the ops of a layer that the fusion names as one."""
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
    """Have a norm of the residual stream quantize its result for the ops behind it whose names `takes` has."""
    found = list(ops)
    for place, norm in enumerate(ops):
        if norm.form is not ADD_NORM:
            continue
        value, readers = norm.writes[0], []
        for behind in range(place + 1, len(ops)):
            if value in ops[behind].reads and ops[behind].name in takes:
                readers.append(behind)
            if value in ops[behind].writes:
                break
        if readers:
            found[place] = replace(norm, form=NORM_ROWS, writes=(*norm.writes, value + ROWS))
        for reader in readers:
            found[reader] = replace(found[reader], reads=(*found[reader].reads, value + ROWS))
    return tuple(found)
