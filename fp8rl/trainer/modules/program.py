"""The layer that exact mode gives Megatron: it holds weights, and runs the model's program with them.

Megatron still splits weights and sequence over ranks, runs pipelines, recomputes whole layers, writes checkpoints and
has the distributed optimizer. Values are [S, B, ...]. With sequence parallelism a tensor-parallel rank has a part of S
between products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from fp8rl.models import Model
from fp8rl.models.families import families_of_layer
from fp8rl.models.program import ADD_NORM, CHOSEN, NORM, Op, OpSite, Watch, norm_weight, run
from fp8rl.models.tensors import TensorRow
from fp8rl.trainer.config import Recompute
from fp8rl.trainer.modules.exact import Experts, Held, Product, hold, place
from fp8rl.trainer.modules.host import LayerHost, Normed
from fp8rl.trainer.modules.precision import KVRounding, LayerPrecision
from fp8rl.trainer.modules.rows import PackedRows


class ProgramLayer(Held):
    """One layer of the model: its tensors, and its ops in their order."""

    watch: Watch | None = None
    """Called after each op with its inputs and outputs. With it, ops are not fused, and none is recomputed."""

    def __init__(
        self,
        config: TransformerConfig,
        definition: Model,
        precision: LayerPrecision,
        recompute: Recompute,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ) -> None:
        super().__init__(config, pg_collection, precision)
        number, self.sizes, self.kv = precision.layer, definition.sizes, KVRounding(precision)
        self.layer_number = number + 1  # Megatron counts from 1
        rows = [row for row in definition.tensors.rows.values() if row.layer == number and row.adapts is None]
        hold(self, rows, precision)
        self.tensors_of: dict[str, list[TensorRow]] = {}
        for row in rows:
            self.tensors_of.setdefault(row.op, []).append(row)
        self.table = definition.tensors
        families = families_of_layer(definition.architecture.families, self.sizes, number)
        ops = [(op, family.part) for family in families for op in family.ops(self.sizes)]
        self.sites = tuple(OpSite(number, op) for op, _ in ops)
        if any(CHOSEN in op.writes for op, _ in ops):
            self.router_replay = RouterReplay()
        again = {op.name for op, part in ops if (op.form.across_tokens if recompute == "attention" else part == "mlp")}
        fused = norms_in_products([op for op, _ in ops], self._takes_norm)
        self._blocks = blocks(fused, again if recompute in ("attention", "experts") else set(), number)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        packed_seq_params: PackedRows | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """[S, B, H] -> [S, B, H], and no context"""
        host = LayerHost(self, packed_seq_params)
        values: dict[str, Any] = {"x": hidden_states, "residual": None}
        if self.watch is not None:
            run(self.sites, host, values, self.watch)
        else:
            for block in self._blocks:
                again = block.recomputed and self.training and torch.is_grad_enabled()
                values |= block.computed_again(host, values) if again else run(block.sites, host, values)
        return values["x"] + values["residual"], None

    @contextmanager
    def around_ops(self, around: Callable[[OpSite, Callable[[], Sequence[Any]]], Sequence[Any]]) -> Iterator[None]:
        """Wrap each op inside the block, also if the backward pass recomputes it. around: takes the op and a function
        that computes it; returns the op's outputs."""

        def called(site: OpSite) -> OpSite:
            compute = site.op.form.compute

            def call(host: Any, at: OpSite, *read: Any) -> Sequence[Any]:
                return around(site, partial(compute, host, at, *read))

            return replace(site, op=replace(site.op, form=replace(site.op.form, compute=call)))

        plain = self._blocks
        self._blocks = tuple(replace(block, sites=tuple(map(called, block.sites))) for block in plain)
        try:
            yield
        finally:
            self._blocks = plain

    def parameter(self, row: TensorRow) -> Tensor:
        """Return the parameter, or the buffer, that holds a tensor."""
        module, _, name = place(row).rpartition(".")
        return getattr(self.get_submodule(module), name)  # type: ignore[no-any-return]

    def product(self, row: TensorRow) -> Product:
        """Return the product whose weight holds a tensor."""
        return self.get_submodule(place(row).rpartition(".")[0])  # type: ignore[return-value]

    @property
    def experts(self) -> Experts | None:
        """Return this rank's experts, if the layer has some."""
        return next((module for module in self.modules() if isinstance(module, Experts)), None)

    def _takes_norm(self, op: Op) -> bool:
        """Return whether an op is one product, which may compute the norm before it."""
        own = [row for row in self.tensors_of.get(op.name, ()) if row.product]
        return len({place(row) for row in own}) == 1 and all(row.kind and row.expert is None for row in own)


# Parts of a layer that the backward pass recomputes.


@dataclass(frozen=True)
class Block:
    """Consecutive ops. reads: names of their inputs. writes: names of their outputs that later ops read."""

    sites: tuple[OpSite, ...]
    recomputed: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def computed_again(self, host: LayerHost, values: dict[str, Any]) -> dict[str, Any]:
        """Run the ops and keep only their inputs; the backward pass runs the ops once more."""

        def compute(*given: Any) -> tuple[Tensor, ...]:
            made = run(self.sites, host, dict(zip(self.reads, given)))
            return tuple(made[name] for name in self.writes)

        made = tensor_parallel.checkpoint(compute, False, *(values.get(name) for name in self.reads))
        return dict(zip(self.writes, made, strict=True))


def blocks(ops: Sequence[Op], again: set[str], layer: int) -> tuple[Block, ...]:
    """Cut the ops of a layer into blocks. again: names of the ops that the backward pass recomputes."""
    cuts = [at for at, op in enumerate(ops) if not at or (op.name in again) != (ops[at - 1].name in again)]
    found = []
    for first, end in zip(cuts, [*cuts[1:], len(ops)], strict=True):
        reads: dict[str, None] = {}
        writes: dict[str, None] = {}
        for op in ops[first:end]:
            reads |= dict.fromkeys(name for name in op.reads if name not in writes)
            writes |= dict.fromkeys(op.writes)
        wanted = {name for op in ops[end:] for name in op.reads} | {"x", "residual"}
        sites = tuple(OpSite(layer, op) for op in ops[first:end])
        kept = tuple(name for name in writes if name in wanted)
        found.append(Block(sites, ops[first].name in again, tuple(reads), kept))
    return tuple(found)


# A norm and the FP8 product after it are one op (`ops.norm_fp8_linear`), which keeps only the norm's input.


def _left_to_product(host: Any, site: OpSite, x: Tensor, residual: Tensor | None = None) -> Sequence[Any]:
    total = x if residual is None else x + residual
    normed = Normed(total, norm_weight(host, site), host.sizes.norm_eps)
    return (normed, total)[: len(site.op.writes)]


def norms_in_products(ops: Sequence[Op], takes: Callable[[Op], bool]) -> list[Op]:
    """Let the op after a norm compute the norm too, if no other op reads it and `takes` returns True for the op."""
    found = list(ops)
    for at, norm in enumerate(ops[:-1]):
        value, behind = norm.writes[0], ops[at + 1]
        alone = value in behind.writes or not _is_read(value, ops[at + 2 :])
        if norm.form in (NORM, ADD_NORM) and behind.reads == (value,) and alone and takes(behind):
            found[at] = replace(norm, form=replace(norm.form, compute=_left_to_product))
    return found


def _is_read(value: str, ops: Sequence[Op]) -> bool:
    """Return whether an op reads the value before another op replaces it."""
    touching = next((op for op in ops if value in (*op.reads, *op.writes)), None)
    return touching is not None and value in touching.reads
