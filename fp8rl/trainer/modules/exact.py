"""Modules of a layer in exact mode, which hold its tensors and compute its products.

Tensor-parallel ranks split the rows or the columns of a weight as the table of the model's tensors says
(`Location.split`). `trainer.modules.program` makes the modules from this table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

from fp8rl.models.tensors import TensorRow, TensorTable
from fp8rl.numerics import ops
from fp8rl.numerics.ops import ExpertWeights
from fp8rl.numerics.ops.experts import adapted_grouped_linear
from fp8rl.numerics.ops.linear import Backward
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.modules.precision import Adapter, LayerPrecision
from fp8rl.trainer.modules.weights import norm_parameter


class Held(MegatronModule):
    """Holds tensors of a layer. This rank has each tensor whole, or a part of it."""

    halves: frozenset[str] = frozenset()
    """Names of tensors that have the gate's rows, then the up projection's rows. Ranks split each half separately."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection, precision: LayerPrecision) -> None:
        super().__init__(config)
        self.groups, self.tp_group, self.precision = groups, groups.tp, precision

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Describe every tensor for Megatron's checkpoints, with the axis that tensor-parallel ranks split."""
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


@dataclass(frozen=True)
class Cut:
    """Cuts the product with a fused parameter into the products with the checkpoint's matrices."""

    groups: int
    """Number of this rank's groups of heads. Each group has rows of every matrix. 1: each matrix is in one piece."""
    sizes: tuple[int, ...]
    """Number of rows that each matrix has in a group."""

    @classmethod
    def of(cls, rows: Sequence[TensorRow], table: TensorTable, ranks: int) -> Cut:
        """Return the cut of a parameter. rows: the matrices in it. ranks: the number of ranks that split its rows."""
        groups = table.groups_of(rows) // ranks if rows[0].megatron.layout == "heads" else 1
        return cls(groups, tuple(row.shape[0] // ranks // groups for row in rows))

    def __call__(self, product: Tensor) -> Sequence[Tensor]:
        """[..., N] -> [..., rows of a matrix] each"""
        if len(self.sizes) == 1:
            return [product]
        parts = product.unflatten(-1, (self.groups, -1)).split(self.sizes, -1)
        return [part.flatten(-2) for part in parts]


@dataclass(frozen=True)
class Normed:
    """A norm that is not computed yet. The only product that reads its result computes it."""

    x: Tensor
    weight: Tensor
    eps: float


class Product(Held):
    """Computes the product of x and a weight [N, K].

    kind: the module kind that a spec names to quantize the product. axis: the weight's axis that tensor-parallel ranks
    split. None: each rank has the whole weight, and computes the product with its own tokens. cut: cuts the result into
    the results of the checkpoint's matrices.

    K is cut into `numerics.k_splits` slices, whose FP32 partial sums are added in order and rounded once. If ranks
    split K, each computes an equal number of slices, one after the other. So all layouts give the same bits.
    """

    adapter: Adapter | None = None
    kind: str | None = None
    axis: int | None = None
    cut: Cut
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor | Normed) -> Tensor:
        """[S, B, K] -> [S, B, N]. With sequence parallelism, x has this rank's part of S if ranks split N, and the
        result has this rank's part of S if they split K."""
        p = self.precision
        if isinstance(x, Normed):
            alone = self.tp_group.size() == 1 and self.axis != 1
            if alone and p.quantizes(self.kind) and p.used(self.adapter) is None:
                held = self.weight, p.operand(self.weight), p.spec, p.backward
                return ops.add_bias(ops.norm_fp8_linear(x.x, x.weight, x.eps, *held), self.bias)
            x = ops.rms_norm(x.x, x.weight, x.eps)
        if self.axis == 1:
            return self._over_ranks(x)
        if self.axis == 0:
            x = whole_sequence(x, self.config.sequence_parallel, self.tp_group)
            # A separate node of autograd adds up the gradients of x from the product and its adapter, as where ranks
            # gather x. The sum is then added to the gradients from other readers.
            x = x.view_as(x)
        return ops.add_bias(p.product(self.kind, x, self.weight, self.adapter), self.bias)

    def of_heads(self, x: Tensor, first: int, count: int, transposed: bool = False) -> Tensor:
        """Compute `ops.head_linear` with the adapter: x [S, B, heads, R] -> [S, B, heads, count] if not transposed."""
        p, adapter, place = self.precision, self.precision.used(self.adapter), (first, count, transposed)
        operand = p.operand(self.weight) if p.quantizes(self.kind) else None
        rows, weight = x.flatten(0, 1), p.plain(self.weight) if operand is None else self.weight
        if adapter is None:
            out = ops.head_linear(rows, weight, operand, *place)
        elif adapter.merges:
            term = ops.head_term(rows.detach(), adapter.low_rank, *place)
            out = ops.with_term_gradient(ops.head_linear(rows, weight, operand, *place), term)
        else:
            out = ops.head_linear(rows, weight, operand, *place, ops.head_term(rows, adapter.low_rank, *place))
        return out.unflatten(0, x.shape[:2])

    def _over_ranks(self, x: Tensor) -> Tensor:
        p, weight, group, adapter = self.precision, self.weight, self.tp_group, self.precision.used(self.adapter)
        slices = p.model.numerics.k_splits // group.size()
        if group.size() == 1:
            return p.product(self.kind, x, weight, adapter, slices)
        operand = p.operand(weight) if p.quantizes(self.kind) else None
        multiplied = p.plain(weight) if operand is None else weight
        partials = ops.partial_sums(slices, x, multiplied, operand, p.spec, p.backward)
        term = None
        if adapter is not None and adapter.merges:
            partials[0] = adapter.with_adapter_gradient(partials[0], x)  # each has the gradient of their sum
        elif adapter is not None:
            low_rank = adapter.low_rank
            of_a = ops.stacked(ops.partial_sums(slices, x, low_rank.a))
            inner: Tensor = _MergeOverRanks.apply(of_a, None, x.dtype, group)
            term = ops.low_rank_term(inner, low_rank.b, low_rank.scale, low_rank.parts)
        return _MergeOverRanks.apply(ops.stacked(partials), term, x.dtype, group)  # type: ignore[no-any-return]


class StackedWeights(Held):
    """Holds one matrix of each of this rank's experts, in one parameter `weight` [experts, N, K].

    Tensor-parallel ranks do not split an expert (expert_tensor_parallel_size is 1). kind: as in `TensorRow`.
    """

    adapter: Adapter | None = None
    kind: str | None = None
    weight: nn.Parameter

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Describe all experts of a layer under one checkpoint key, the key of TransformerEngine's grouped products."""
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
        if not self.merges:
            return ops.experts(x, counts, *self.operands())
        return self._product(ops.swiglu(self._product(x, counts, self.linear_fc1)), counts, self.linear_fc2)

    @property
    def merges(self) -> bool:
        """Whether an adapter is merged, which gets its gradient beside a product (`Adapter.with_adapter_gradient`)."""
        used = (self.precision.used(linear.adapter) for linear in (self.linear_fc1, self.linear_fc2))
        return any(adapter is not None and adapter.merges for adapter in used)

    def operands(self) -> tuple[ExpertWeights, ExpertWeights, QuantSpec, Backward]:
        """Return the arguments of `ops.experts` behind the rows."""
        p = self.precision
        return self._weights(self.linear_fc1), self._weights(self.linear_fc2), p.spec, p.backward

    def _weights(self, linear: StackedWeights) -> ExpertWeights:
        stack, p = linear.weight, self.precision
        adapter = p.used(linear.adapter)
        low_rank = None if adapter is None or adapter.merges else adapter.low_rank
        if not p.quantizes(linear.kind):
            return ExpertWeights(p.plain(stack), None, low_rank)
        return ExpertWeights(stack, p.operand(stack), low_rank)

    def _product(self, x: Tensor, counts: Tensor, linear: StackedWeights) -> Tensor:
        """Compute one of the two products of `ops.experts`, with a gradient for a merged adapter."""
        out = adapted_grouped_linear(x, counts, self._weights(linear), self.precision.spec, self.precision.backward)
        adapter = self.precision.used(linear.adapter)
        return out if adapter is None else adapter.with_adapter_gradient(out, x, counts)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Describe the tensors under the keys of Megatron's grouped MLP, in which `experts.` is doubled."""
        sharded = super().sharded_state_dict("", sharded_offsets, metadata)
        replace_prefix_for_sharding(sharded, "", f"{prefix}experts.")
        return {f"{prefix}{name}": tensor for name, tensor in sharded.items()}


def whole_sequence(x: Tensor, in_parts: bool, group: dist.ProcessGroup) -> Tensor:
    """Gather the sequence if each tensor-parallel rank has a part. Each rank gets the gradient of its part."""
    if not in_parts:
        return x
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)


# Both ends of the model.


class RMSNorm(nn.Module):
    """`ops.rms_norm` over the last axis."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = norm_parameter(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return ops.rms_norm(x, ops.one_plus(self.weight) if self.zero_centered else self.weight, self.eps)


class PlainColumnLinear(ColumnParallelLinear):
    """Computes the output projection (lm_head), which is never quantized. Tensor-parallel ranks split its output
    features, and gather its logits."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *unused: Any, **context: Any) -> Tensor:
        return ops.linear(whole_sequence(input, context["sequence_parallel"], context["tp_group"]), weight)


class _MergeOverRanks(torch.autograd.Function):
    """Adds the FP32 partial sums of all ranks' slices of K in order, then `plus`. Each rank has [slices, S, B, N], and
    gets its part of the sequence."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, plus: Tensor | None, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.slices = group, len(sums)
        sent = sums.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
        parts = torch.empty_like(sent)
        dist.all_to_all_single(parts, sent, group=group)
        return ops.merge_partials(list(parts.flatten(0, 1)), dtype, plus)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        whole = gather_from_sequence_parallel_region(grad, tensor_parallel_output_grad=False, group=ctx.group)
        of_each = whole.float().expand(ctx.slices, *whole.shape)
        return of_each, grad if ctx.needs_input_grad[1] else None, None, None
