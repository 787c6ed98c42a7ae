"""A layer in exact mode: holds the layer's weights, and runs the model's program with them.

Megatron still splits weights and sequences over ranks, runs pipelines, recomputes whole layers, writes checkpoints and
has the distributed optimizer. Values are [S, B, ...]. With sequence parallelism a tensor-parallel rank has only a part
of S between products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from fp8rl.models import Model
from fp8rl.models.program import ADD_NORM, CHOSEN, NORM, Op, OpSite, norm_weight, run
from fp8rl.models.tensors import TensorRow, TensorTable
from fp8rl.trainer.config import Recompute
from fp8rl.trainer.modules.exact import Cut, Experts, Held, Normed, Product, StackedWeights
from fp8rl.trainer.modules.host import LayerHost
from fp8rl.trainer.modules.precision import KVRounding, LayerPrecision
from fp8rl.trainer.modules.rows import PackedRows
from fp8rl.trainer.modules.weights import empty_weight, norm_parameter, tag_split


class OpsModule(Held):
    """A module that runs ops of the program: a layer, or in native mode a part of a layer."""

    weights: dict[str, OpWeights]
    blocks: tuple[Block, ...]

    def run_blocks(self, host: LayerHost, values: dict[str, Any]) -> dict[str, Any]:
        """Run the ops on `values`, by name. Return the values with the ops' outputs."""
        for block in self.blocks:
            again = block.recomputed and self.training and torch.is_grad_enabled()
            values |= block.computed_again(host, values) if again else run(block.sites, host, values)
        return values


class ProgramLayer(OpsModule):
    """One layer of the model: holds its tensors, and runs its ops in their order."""

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
        self.weights = hold(self, definition.tensors.in_layer[number], definition.tensors)
        ops = [(op, family.part) for family in definition.families[number] for op in family.ops(self.sizes)]
        if any(CHOSEN in op.writes for op, _ in ops):
            self.router_replay = RouterReplay()
        again = {op.name for op, part in ops if (op.form.across_tokens if recompute == "attention" else part == "mlp")}
        fused = norms_in_products([op for op, _ in ops], self._takes_norm)
        self.blocks = cut_blocks(fused, again if recompute in ("attention", "experts") else set(), number)

    def forward(
        self, hidden_states: Tensor, packed_seq_params: PackedRows | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        """[S, B, H] -> [S, B, H], and no context"""
        host = LayerHost(self, packed_seq_params)
        values = self.run_blocks(host, {"x": hidden_states, "residual": None})
        return values["x"] + values["residual"], None

    def _takes_norm(self, op: Op) -> bool:
        """Return whether an op is a single product that can compute the norm before it."""
        own = self.weights.get(op.name, OpWeights())
        return len(own.products) == 1 and own.products[0].kind is not None and own.experts is None


# The weights of a layer.

BUILT_FIRST = ("linear_proj", "linear_q_down_proj", "linear_q_up_proj")
"""Modules that Megatron's attention makes before its other modules. The order of parameters is also the order in the
sum over all gradients and in the optimizer's buffers."""


@dataclass
class OpWeights:
    """The weights of one op."""

    products: list[Any] = field(default_factory=list)
    """The modules of its products. In exact mode they are `Product`s."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The tensors, by the last part of their names in the checkpoint. "": the op's only tensor beside its products."""
    experts: Experts | None = None


def hold(layer: Held, rows: Sequence[TensorRow], table: TensorTable, inside: str = "") -> dict[str, OpWeights]:
    """Give a layer its uninitialised parameters and buffers, in modules with the tensors' names in Megatron. Return the
    weights of each op. inside: the prefix of these names that stands for `layer` itself."""
    held: dict[str, dict[str, list[TensorRow]]] = {}
    for row in rows:
        path, _, name = place(row, inside).rpartition(".")
        held.setdefault(path, {}).setdefault(name, []).append(row)
    tops = list(dict.fromkeys(path.partition(".")[0] for path in held))

    def order(path: str) -> tuple[int, int]:
        top, _, rest = path.partition(".")
        name = rest.partition(".")[0]
        return tops.index(top), BUILT_FIRST.index(name) if name in BUILT_FIRST else len(BUILT_FIRST)

    for path in sorted(held, key=order):
        tensors, module, names = held[path], layer, path.split(".") if path else []
        kinds: list[type[Held]] = [Held] * len(names)
        if next(iter(tensors.values()))[0].expert is not None:
            kinds[-2:] = Experts, StackedWeights
        elif any(row.product for row in tensors.get("weight", ())):
            kinds[-1] = Product
        for name, kind in zip(names, kinds, strict=True):
            if not hasattr(module, name):
                module.add_module(name, kind(layer.config, layer.groups, layer.precision))
            module = getattr(module, name)
        for name in sorted(tensors, key=lambda name: (name != "weight", name != "bias")):  # as Megatron has them
            _give(module, name, tensors[name], table)
    found: dict[str, OpWeights] = {}
    for row in rows:
        path, _, name = place(row, inside).rpartition(".")
        module, own = layer.get_submodule(path), found.setdefault(row.op, OpWeights())
        if row.expert is not None:
            own.experts = layer.get_submodule(path.rpartition(".")[0])  # type: ignore[assignment]
            continue
        if isinstance(module, Product) and row.product and module not in own.products:
            own.products.append(module)
        own.tensors[row.name.rpartition(".")[2]] = getattr(module, name)
        if not row.product or "" not in own.tensors:  # an op may have a norm beside its product
            own.tensors[""] = getattr(module, name)
    return found


def place(row: TensorRow, inside: str = "") -> str:
    """Return the name, in the layer, of the parameter with this tensor. All experts share one parameter."""
    name = row.megatron.parameter.removeprefix(f"decoder.layers.{row.layer}.{inside}")
    return name if row.expert is None else name.rstrip("0123456789")


def _give(module: Held, name: str, rows: Sequence[TensorRow], table: TensorTable) -> None:
    """Register one parameter with this rank's part of `rows`, end to end. Further axes of a tensor are flattened."""
    first, axis, config = rows[0], rows[0].engine.split, module.config
    own = [row for row in rows if row.expert == first.expert]
    shape = (sum(row.shape[0] for row in own), *([math.prod(first.shape[1:])] if first.shape[1:] else []))
    if isinstance(module, StackedWeights):
        module.kind = first.kind
        module.register_parameter(name, empty_weight(config, len(rows) // len(own) // module.groups.ep.size(), *shape))
        return
    if first.megatron.buffer:
        module.register_buffer(name, torch.zeros(shape, dtype=torch.float32, device=torch.cuda.current_device()))
        return
    dtype = torch.float32 if first.trained == torch.float32 else None
    ranks = 1 if axis is None else module.tp_group.size()
    shape = tuple(size // ranks if at == axis else size for at, size in enumerate(shape))
    if len(shape) == 1 and axis is None:
        module.register_parameter(name, norm_parameter(config, shape[0], dtype))
        return
    weight = empty_weight(config, *shape, dtype=dtype)
    if axis is None:
        setattr(weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
    else:
        tag_split(weight, axis)
    module.register_parameter(name, weight)
    if name == "weight" and isinstance(module, Product):
        module.register_parameter("bias", None)  # behind the weight, until there is one
        module.kind, module.axis, module.cut = first.kind, axis, Cut.of(rows, table, ranks)
        if axis == 0 and len(rows) == 2 and first.megatron.layout == "rows":
            module.halves = frozenset({"weight"})


# Parts of a layer that the backward pass recomputes.


@dataclass(frozen=True)
class Block:
    """Consecutive ops of a layer. reads: names of their inputs. writes: names of the outputs that later ops read."""

    sites: tuple[OpSite, ...]
    recomputed: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def computed_again(self, host: LayerHost, values: dict[str, Any]) -> dict[str, Any]:
        """Run the ops and keep only their inputs. The backward pass runs the ops again."""

        def compute(*given: Any) -> tuple[Tensor, ...]:
            made = run(self.sites, host, dict(zip(self.reads, given)))
            return tuple(made[name] for name in self.writes)

        made = tensor_parallel.checkpoint(compute, False, *(values.get(name) for name in self.reads))
        return dict(zip(self.writes, made, strict=True))


def cut_blocks(ops: Sequence[Op], again: set[str], layer: int) -> tuple[Block, ...]:
    """Cut the ops of a layer into blocks. again: the names of ops to recompute, which get separate blocks."""
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


# A norm and the FP8 product after it are one op (`ops.norm_fp8_linear`), which keeps only the norm's input. So are the
# norms of heads and the rotation after them (`ops.rope_heads`).


def _left_to_product(host: Any, site: OpSite, x: Tensor, residual: Tensor | None = None) -> Sequence[Any]:
    total = x if residual is None else x + residual
    normed = Normed(total, norm_weight(host, site), host.sizes.norm_eps)
    return (normed, total)[: len(site.op.writes)]


def norms_in_products(ops: Sequence[Op], takes: Callable[[Op], bool]) -> list[Op]:
    """Let the op after a norm compute the norm, if no other op reads the norm and `takes` returns True for this op."""
    found = list(ops)
    for at, norm in enumerate(ops[:-1]):
        value, behind = norm.writes[0], ops[at + 1]
        later = next((op for op in ops[at + 2 :] if value in (*op.reads, *op.writes)), None)
        alone = value in behind.writes or later is None or value not in later.reads
        taken = norm.form in (NORM, ADD_NORM) and behind.reads == (value,) and alone and takes(behind)
        if taken or norm.form.name == "head_norm":
            found[at] = replace(norm, form=replace(norm.form, compute=_left_to_product))
    return found
