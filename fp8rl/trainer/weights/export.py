"""The export of a model's weights as tensors of its Hugging Face checkpoint, each from exactly one rank.

So no rank sees them all. An expert comes from a rank that holds it. A weight that tensor parallelism has split is
gathered at one of the ranks that hold its parts. Of ranks that hold the same, one with the least to export so far is
taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mbridge.core import Bridge
from mbridge.core.safetensor_io import SafeTensorIO
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from fp8rl.models.checkpoint.reading import read_tensors
from fp8rl.models.shared_base import SharedBase
from fp8rl.models.tensors import TensorRow, TensorTable
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec
from fp8rl.numerics.weight_cache import Frozen, freeze
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron import te_runtime


class Dealer:
    """Assigns parameters to ranks that hold the same, so that each exports about as many bytes."""

    def __init__(self, ranks: int) -> None:
        self._dealt = [0] * ranks

    def next(self, size: int) -> int:
        """Return the index of the rank that exports a parameter of `size` bytes."""
        turn = self._dealt.index(min(self._dealt))
        self._dealt[turn] += size
        return turn


class Exporter:
    """Exports this rank's shard of a model.

    bridge: of the weights; scale_bridge: of the scales of those that are held in FP8, quantized as `quantized_as`.
    """

    def __init__(
        self, bridge: TableBridge, scale_bridge: TableBridge, quantized_as: TensorSpec, layout: Layout
    ) -> None:
        self._bridge, self._scale_bridge, self._spec = bridge, scale_bridge, quantized_as
        self._layout = layout

    @torch.no_grad()
    def share(
        self, weights: Iterable[tuple[str, Tensor, Tensor]], base: SharedBase | None = None
    ) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """Yield the (HF name, tensor) pairs of this rank's shard. All ranks must iterate to the end: parts are
        gathered.

        weights: (Megatron's name in the whole model, this rank's part of it, tagged as by Megatron, and the tensor that
        is served in place of it), in the same order on all ranks of a pipeline stage. base: its tensors are taken from
        there, whole, on all ranks.
        """
        at = self._layout
        dense, experts = Dealer(at.dp_size * at.tp_size), Dealer(at.expert_dp_size)
        for name, held, served in weights:
            row = self._bridge.rows(name)[0]
            if name in row.copies:
                continue  # the stage with the original hands it out
            if row.expert is not None:
                if experts.next(held.nbytes) == at.expert_dp_rank:
                    if base is not None and row.name in base.tensors:
                        yield from self._of_base(name, base)
                    else:
                        yield from self._tensors(name, held, [self._pieces(held, served)])
                continue
            its_replica, its_rank = divmod(dense.next(held.nbytes), at.tp_size)
            if its_replica != at.dp_rank:
                continue
            if base is not None and row.name in base.tensors:
                if its_rank == at.tp_rank:
                    yield from self._of_base(name, base)
                continue
            if at.tp_size > 1 and getattr(held, "tensor_model_parallel", False):
                parts = _gathered(self._pieces(held, served), its_rank, at.tp_group)
            else:
                parts = [self._pieces(held, served)]
            if its_rank == at.tp_rank:
                yield from self._tensors(name, held, parts)

    def _of_base(self, name: str, base: SharedBase) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        return ((row.name, base.tensor(row.name)) for row in self._bridge.rows(name))

    def _pieces(self, held: Tensor, served: Tensor) -> list[Tensor]:
        """Return a weight, or the codes and the scales of one that TransformerEngine holds in FP8."""
        if not te_runtime.is_quantized(held):
            return [served]
        weight = te_runtime.quantized(held)
        assert weight.spec == self._spec, f"found a weight that is {weight.spec}, expected {self._spec}"
        return [weight.data.view(torch.uint8), weight.scale_inv.contiguous()]

    def _tensors(
        self, name: str, held: Tensor, parts: list[list[Tensor]]
    ) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """Yield the tensors in a parameter. parts: the pieces of each rank that shares it."""
        names = [row.name for row in self._bridge.rows(name)]
        cut = [
            bridge._weight_to_hf_format(name, bridge._weight_merge_across_tp(name, list(piece), held))[1]
            for bridge, piece in zip((self._bridge, self._scale_bridge), zip(*parts, strict=True))
        ]
        for tensor_name, (values, *scales) in zip(names, zip(*cut, strict=True), strict=True):
            quantized = QuantizedTensor(values.view(self._spec.dtype), scales[0], self._spec) if scales else values
            yield tensor_name, quantized


def _gathered(pieces: list[Tensor], owner: int, group: dist.ProcessGroup) -> list[list[Tensor]]:
    """Gather the pieces of every rank of `group` on rank `owner`; nothing elsewhere. All of them take part."""
    here = group.rank() == owner
    parts: list[list[Tensor]] = []
    for piece in pieces:
        received = [torch.empty_like(piece) for _ in range(group.size())] if here else []
        dist.gather(piece.contiguous(), received or None, group=group, group_dst=owner)
        parts.append(received)
    return [list(of_rank) for of_rank in zip(*parts, strict=True)]


# A frozen parameter of the trainer, read from a base in the engine's layout.
#
# What products take in FP8 is multiplied from the base's codes (`weight_cache.Frozen`); Megatron's order of rows and a
# rank's part are taken in each call. What is not quantized becomes a view of the base where it stands there as here,
# and stays the trainer's own where it does not: a fused q|k|v in BF16, a part of a row-parallel weight, another
# dtype.


def adopt(parameter: nn.Parameter, names: Sequence[str], base: SharedBase, scales: TableBridge, layout: Layout) -> bool:
    """Let a frozen parameter read its values from the base; return True if it can.

    names: in the whole model; of stacked experts, of each. scales: the bridge of the scales of weights.
    """
    in_table = all(name in base.model.tensors.in_megatron for name in names)
    rows = [scales.rows(name) for name in names] if in_table else []
    if not rows or rows[0][0].name not in base.tensors:
        return False
    stacked = parameter.dim() == 3
    held = base.fused(rows[0], len(rows) if stacked else 0)
    split = getattr(parameter, "tensor_model_parallel", False) and not stacked and rows[0][0].expert is None
    axis = getattr(parameter, "partition_dim", 0) if split else None
    ranks, rank = (layout.tp_size, layout.tp_rank) if split else (1, 0)
    if isinstance(held, QuantizedTensor):
        freeze(parameter, _frozen(held, names[0], rows[0], parameter, scales, ranks, rank, axis))
        return True
    view = held if axis is None else held.chunk(ranks, axis)[rank]
    alike = (view.shape, view.dtype) == (parameter.shape, parameter.dtype) and view.is_contiguous()
    if rows[0][0].megatron.layout == "heads" or len(rows[0]) > 1 < ranks or not alike:
        return False
    parameter.data = view
    return True


def _frozen(
    held: QuantizedTensor,
    name: str,
    rows: Sequence[TensorRow],
    parameter: Tensor,
    scales: TableBridge,
    ranks: int,
    rank: int,
    axis: int | None,
) -> Frozen:
    if axis == 1:
        return Frozen(held).columns(rank, ranks)
    block = held.spec.group
    if ranks == 1 and rows[0].megatron.layout == "rows":
        return Frozen(held)
    blocks = torch.arange(held.data.shape[-2] // block, device=held.data.device)
    pieces = list(blocks.split([row.shape[0] // block for row in rows]))
    order = scales._weight_to_mcore_format(name, pieces)
    order = scales._weight_split_across_tp(name, order, parameter, ranks)[rank]
    return Frozen(held, order.contiguous(), block)


# mbridge's traversal of a model and its ranks.


class TableBridge(Bridge):
    """The loader and exporter of a Megatron model's parameters as tensors of its Hugging Face checkpoint.

    block: rows and columns of a weight for each element of what is exported; 1 for the weights themselves.
    """

    def __init__(self, table: TensorTable, config: TransformerConfig, block: int = 1) -> None:
        self._table, self._block, self._megatron = table, block, config
        super().__init__(hf_config=None)

    def rows(self, parameter: str) -> Sequence[TensorRow]:
        """Return the tensors in a parameter, by its name in the whole model."""
        return self._table.in_megatron[parameter]

    def whole_names(self, model: Any) -> dict[str, str]:
        """Return the names of a rank's parameters in the whole model."""
        names: dict[str, str] = super()._weight_name_mapping_mcore_local_to_global(model)
        return names

    def _weight_name_mapping_mcore_local_to_global(self, model: Any, consider_ep: bool = True) -> dict[str, str]:
        """Return each parameter's name in the whole model, by which it goes here already (`HFWeights.load`).

        mbridge asks for layouts by a rank's own names, which in another pipeline stage may be those of another kind of
        layer.
        """
        return {name: name for name in model.state_dict()}

    def _build_config(self) -> TransformerConfig:
        return self._megatron

    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO:
        return _Files(weights_path)  # mbridge's takes what is no directory for a name on a hub

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        return [row.name for row in self.rows(mcore_weights_name)]

    def _weight_to_hf_format(self, mcore_weights_name: str, mcore_weights: Tensor) -> tuple[list[str], list[Tensor]]:
        rows = self.rows(mcore_weights_name)
        return [row.name for row in rows], self._table.split(mcore_weights, rows, self._block)

    def _weight_to_mcore_format(self, mcore_weights_name: str, hf_weights: list[Tensor]) -> Tensor:
        return self._table.fuse(hf_weights, self.rows(mcore_weights_name), self._block)

    def _weight_merge_across_tp(self, mcore_weights_name: str, mcore_weights: list[Tensor], param: Any) -> Tensor:
        """Merge one rank's part after the other into one tensor after the other."""
        rows, ranks = self.rows(mcore_weights_name), len(mcore_weights)
        if ranks == 1:
            return mcore_weights[0]
        if param.partition_dim == 1 or rows[0].megatron.layout == "heads":
            return torch.cat(mcore_weights, param.partition_dim)
        parts = [self._table.split(part, rows, self._block, ranks) for part in mcore_weights]
        shares = zip(rows, zip(*parts, strict=True), strict=True)
        return self._table.fuse([row.join(own) for row, own in shares], rows, self._block)

    def _weight_split_across_tp(
        self, mcore_weights_name: str, mcore_weights: Tensor, param: Any, tp_split_size: int
    ) -> Sequence[Tensor]:
        """Undo the merge."""
        rows, ranks = self.rows(mcore_weights_name), tp_split_size
        if ranks == 1 or not param.tensor_model_parallel:
            return [mcore_weights] * ranks
        if param.partition_dim == 1 or rows[0].megatron.layout == "heads":
            return mcore_weights.chunk(ranks, param.partition_dim)
        whole = self._table.split(mcore_weights, rows, self._block)
        shares = zip(*(row.split(tensor, ranks) for row, tensor in zip(rows, whole, strict=True)))
        return [self._table.fuse(share, rows, self._block, ranks) for share in shares]


class _Files(SafeTensorIO):  # type: ignore[misc]
    """mbridge's, for weights that may be in FP8."""

    def load_some_hf_weight(self, hf_weight_names: list[str]) -> dict[str, Tensor]:
        return read_tensors(Path(self.hf_dir), hf_weight_names)
