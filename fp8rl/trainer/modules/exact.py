"""Modules that hold a layer's tensors in exact mode, under Megatron's names, and compute the products with them.

The modules are made from the table of the model's tensors. The table also says whether tensor-parallel ranks split a
weight's rows or its columns (`Location.split`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from fp8rl.models.tensors import TensorRow
from fp8rl.numerics import ops
from fp8rl.numerics.ops import ExpertWeights
from fp8rl.numerics.ops.experts import adapted_grouped_linear
from fp8rl.trainer.modules.precision import Adapter, LayerPrecision
from fp8rl.trainer.modules.weights import empty_weight, norm_weight, tag_split

BUILT_FIRST = ("linear_proj", "linear_q_down_proj", "linear_q_up_proj")
"""Modules that Megatron's attention makes before its other modules. The order of parameters decides the order of a sum
over all gradients, and of the optimizer's buffers."""


class Held(MegatronModule):
    """Tensors of a layer. This rank holds each tensor whole, or a part of it."""

    halves: frozenset[str] = frozenset()
    """Names of tensors with the gate's rows, then the up projection's. The ranks split each half by itself."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection, precision: LayerPrecision) -> None:
        super().__init__(config)
        self.groups, self.tp_group, self.precision = groups, groups.tp, precision

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return every tensor with the axis that tensor-parallel ranks split, for Megatron's checkpoints."""
        tensors: dict[str, Any] = {}
        self._save_to_state_dict(tensors, "", keep_vars=True)
        split = {name for name, tensor in tensors.items() if getattr(tensor, "tensor_model_parallel", False)}
        sharded: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            tensors,
            prefix,
            {name: tensors[name].partition_dim for name in split},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        for key in (f"{prefix}{name}" for name in self.halves & split):
            sharded[key] = apply_swiglu_sharded_factory(sharded[key], sharded_offsets)
        for name, module in self.named_children():
            sharded |= module.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return sharded


class Product(Held):
    """The weight [N, K] of a product.

    kind: the module kind by which a spec decides whether to quantize the weight. axis: the axis on which the
    tensor-parallel ranks split the weight. None: each rank has it whole, and computes the product of its tokens.

    If ranks split K, their FP32 partial sums are added in rank order and rounded once. A single rank does the same
    with `precision.k_splits` slices of K, so both layouts give the same bits.
    """

    adapter: Adapter | None = None
    kind: str | None = None
    axis: int | None = None
    weight: nn.Parameter
    bias: nn.Parameter | None

    def fuses_norm(self) -> bool:
        """Return whether `ops.norm_fp8_linear` computes this product now, with the norm before it."""
        p = self.precision
        alone = self.tp_group.size() == 1 and self.axis != 1
        return alone and p.quantizes(self.kind) and p.used(self.adapter) is None

    def of_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the product of `ops.rms_norm(x, weight, eps)`."""
        p = self.precision
        out = ops.norm_fp8_linear(x, weight, eps, self.weight, p.operand(self.weight), p.spec, p.backward)
        return ops.add_bias(out, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, K] -> [S, B, N]. With sequence parallelism, x has only this rank's part of S if ranks split N, and the
        result has only this rank's part of S if ranks split K."""
        p = self.precision
        if self.axis == 1:
            return self._over_ranks(x)
        if self.axis == 0:
            x = whole_sequence(x, self.config.sequence_parallel, self.tp_group)
            # The gradients that the product and its adapter give x are added up by a node of their own, as where ranks
            # gather x, and then added to those of other readers.
            x = x.view_as(x)
        return ops.add_bias(p.product(self.kind, x, self.weight, self.adapter), self.bias)

    def _over_ranks(self, x: Tensor) -> Tensor:
        p, weight, group, adapter = self.precision, self.weight, self.tp_group, self.precision.used(self.adapter)
        if group.size() == 1:
            return p.product(self.kind, x, weight, adapter, p.k_splits)
        if p.quantizes(self.kind):
            partial = ops.fp8_linear_partial(x, weight, p.operand(weight), p.spec, p.backward)
        else:
            partial = ops.linear_partial(x, p.plain(weight))
        term = None
        if adapter is not None and adapter.merges:
            partial = adapter.with_adapter_gradient(partial, x)
        elif adapter is not None:
            low_rank = adapter.low_rank
            inner: Tensor = _MergeOverRanks.apply(ops.linear_partial(x, low_rank.a), None, x.dtype, group)
            term = ops.low_rank_term(inner, low_rank.b, low_rank.scale, low_rank.parts)
        return _MergeOverRanks.apply(partial, term, x.dtype, group)  # type: ignore[no-any-return]


class StackedWeights(Held):
    """One matrix of each of this rank's experts, as one parameter `weight` [experts, N, K].

    The experts are not split over tensor-parallel ranks (expert_tensor_parallel_size is 1). kind: as in `TensorRow`.
    """

    adapter: Adapter | None = None
    kind: str | None = None
    weight: nn.Parameter

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return all experts of a layer under one key. `GroupedWeights` can read what this wrote, and the reverse."""
        sharded, groups = super().sharded_state_dict(prefix, sharded_offsets, metadata), self.groups
        for key, held in ((f"{prefix}{name}", weight) for name, weight in self.named_parameters() if weight.dim() == 3):
            sharded[key] = ShardedTensor.from_rank_offsets(
                key,
                held,
                *sharded_offsets,
                (len(sharded_offsets), groups.ep.rank(), groups.ep.size()),
                replica_id=(0, 0, groups.expt_dp.rank()),
                prepend_axis_num=len(sharded_offsets),
            )
        return sharded


class Experts(Held):
    """Holds the weights of this rank's experts, and computes `ops.experts` with them."""

    linear_fc1: StackedWeights
    linear_fc2: StackedWeights

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [T, H] sorted by expert, counts int64 [experts of this rank] -> [T, H]"""
        p, linears = self.precision, (self.linear_fc1, self.linear_fc2)
        w13, w2 = (self._weights(linear) for linear in linears)
        if not any(self._merges(linear) for linear in linears):
            return ops.experts(x, counts, w13, w2, p.spec, p.backward)
        hidden = ops.swiglu(self._product(x, counts, self.linear_fc1, w13))
        return self._product(hidden, counts, self.linear_fc2, w2)

    def _weights(self, linear: StackedWeights) -> ExpertWeights:
        stack, p = linear.weight, self.precision
        adapter = p.used(linear.adapter)
        low_rank = None if adapter is None or adapter.merges else adapter.low_rank
        if not p.quantizes(linear.kind):
            return ExpertWeights(p.plain(stack), None, low_rank)
        return ExpertWeights(stack, p.group_operand(stack), low_rank)

    def _merges(self, linear: StackedWeights) -> bool:
        adapter = self.precision.used(linear.adapter)
        return adapter is not None and adapter.merges

    def _product(self, x: Tensor, counts: Tensor, linear: StackedWeights, w: ExpertWeights) -> Tensor:
        """Compute one of the two products of `ops.experts`, and let its gradient reach a merged adapter."""
        out = adapted_grouped_linear(x, counts, w, self.precision.spec, self.precision.backward)
        adapter = self.precision.used(linear.adapter)
        return out if adapter is None else adapter.with_adapter_gradient(out, x, counts)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the tensors under the keys of Megatron's grouped MLP, in which `experts.` is doubled."""
        sharded = super().sharded_state_dict("", sharded_offsets, metadata)
        replace_prefix_for_sharding(sharded, "", f"{prefix}experts.")
        return {f"{prefix}{name}": tensor for name, tensor in sharded.items()}


def hold(layer: Held, rows: Iterable[TensorRow], precision: LayerPrecision) -> None:
    """Give a layer its parameters and buffers, uninitialised, in modules by the tensors' names in Megatron."""
    held: dict[str, dict[str, list[TensorRow]]] = {}
    for row in rows:
        path, _, name = place(row).rpartition(".")
        held.setdefault(path, {}).setdefault(name, []).append(row)
    tops = list(dict.fromkeys(path.partition(".")[0] for path in held))

    def order(path: str) -> tuple[int, int]:
        top, _, rest = path.partition(".")
        name = rest.partition(".")[0]
        return tops.index(top), BUILT_FIRST.index(name) if name in BUILT_FIRST else len(BUILT_FIRST)

    for path in sorted(held, key=order):
        tensors = held[path]
        first = next(iter(tensors.values()))[0]
        *parents, last = path.split(".")
        owner: Any = layer
        for name in parents:
            if not hasattr(owner, name):
                of_experts = first.expert is not None and name == parents[-1]
                owner.add_module(name, (Experts if of_experts else Held)(layer.config, layer.groups, precision))
            owner = getattr(owner, name)
        if first.expert is not None:
            owner.add_module(last, _stacked(layer, tensors["weight"]))
            continue
        if not hasattr(owner, last):
            kind = Product if any(row.product for row in tensors.get("weight", ())) else Held
            owner.add_module(last, kind(layer.config, layer.groups, precision))
        module = getattr(owner, last)
        for name in sorted(tensors, key=lambda name: (name != "weight", name != "bias")):  # as Megatron has them
            _give(module, name, tensors[name])


def place(row: TensorRow) -> str:
    """Return the name of the parameter in the layer. The experts' matrices are one parameter."""
    name = row.megatron.parameter.removeprefix(f"decoder.layers.{row.layer}.")
    return name if row.expert is None else name.rstrip("0123456789")


def _give(module: Held, name: str, rows: Sequence[TensorRow]) -> None:
    """Register this rank's part of the tensors as one parameter. A tensor with more than two axes becomes a matrix."""
    first, axis, whole = rows[0], rows[0].engine.split, sum(row.shape[0] for row in rows)
    shape: tuple[int, ...] = (whole, math.prod(first.shape[1:])) if first.shape[1:] else (whole,)
    if first.megatron.buffer:
        module.register_buffer(name, torch.zeros(shape, dtype=torch.float32, device=torch.cuda.current_device()))
        return
    dtype = torch.float32 if first.trained == torch.float32 else None
    if axis is not None:
        ranks = module.tp_group.size()
        shape = tuple(size // ranks if at == axis else size for at, size in enumerate(shape))
    if len(shape) == 1 and axis is None:
        module.register_parameter(name, norm_weight(module.config, shape[0], dtype))
        return
    weight = empty_weight(module.config, *shape, dtype=dtype)
    if axis is None:
        setattr(weight, "sequence_parallel", module.config.sequence_parallel)  # noqa: B010
    else:
        tag_split(weight, axis)
    module.register_parameter(name, weight)
    if name == "weight" and isinstance(module, Product):
        module.register_parameter("bias", None)  # behind the weight, until there is one
        module.kind, module.axis = first.kind, axis
        if axis == 0 and len(rows) == 2 and first.megatron.layout == "rows":
            module.halves = frozenset({"weight", "lora_b"})


def _stacked(layer: Held, rows: Sequence[TensorRow]) -> StackedWeights:
    """Make the parameter for this rank's experts: for each expert the rows of its tensors, one tensor after another."""
    experts = {row.expert for row in rows}
    of_one = [row for row in rows if row.expert == rows[0].expert]
    count, outputs = len(experts) // layer.groups.ep.size(), sum(row.shape[0] for row in of_one)
    made = StackedWeights(layer.config, layer.groups, layer.precision)
    made.kind = rows[0].kind
    made.register_parameter("weight", empty_weight(layer.config, count, outputs, rows[0].shape[1]))
    return made


def whole_sequence(x: Tensor, in_parts: bool, group: dist.ProcessGroup) -> Tensor:
    """Gather the sequence from the tensor-parallel ranks if each has a part; its gradient is split in the same way."""
    if not in_parts:
        return x
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)


# Both ends of the model.


class RMSNorm(nn.Module):
    """`ops.rms_norm` over the last axis."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return ops.rms_norm(x, ops.one_plus(self.weight) if self.zero_centered else self.weight, self.eps)


class PlainColumnLinear(ColumnParallelLinear):
    """The output projection (lm_head), which is never quantized. Its output features are split over the tensor-parallel
    ranks, and its logits are gathered from them."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *unused: Any, **context: Any) -> Tensor:
        return ops.linear(whole_sequence(input, context["sequence_parallel"], context["tp_group"]), weight)


class _MergeOverRanks(torch.autograd.Function):
    """Exchanges FP32 partial sums. Each rank adds the sums for its part of the sequence in rank order, then `plus`."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, plus: Tensor | None, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = torch.empty_like(partial)
        dist.all_to_all_single(parts, partial.contiguous(), group=group)
        return ops.merge_partials(list(parts.chunk(group.size())), dtype, plus)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        whole = gather_from_sequence_parallel_region(grad, tensor_parallel_output_grad=False, group=ctx.group)
        return whole.float(), grad if ctx.needs_input_grad[1] else None, None, None
