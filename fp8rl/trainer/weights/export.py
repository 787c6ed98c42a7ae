"""Exports a model's weights as tensors of its Hugging Face checkpoint. Exactly one rank exports each tensor.

No rank needs all tensors. An expert is exported by a rank that has it. If tensor-parallel ranks split a weight, one of
them gathers the parts. If several ranks have a weight, the one with the fewest bytes to export so far exports it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from fp8rl.models import Model
from fp8rl.models.shared_base import SharedBase
from fp8rl.models.tensors import TensorRow, TensorTable
from fp8rl.numerics.quantize import NamedWeight, QuantizedTensor
from fp8rl.numerics.spec import TensorSpec
from fp8rl.numerics.weight_cache import WeightCache, frozen_of
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron import te_runtime
from fp8rl.trainer.modules.weights import is_adapter, matrices


class Dealer:
    """Chooses the rank that exports a parameter, so that all ranks export about equally many bytes."""

    def __init__(self, ranks: int) -> None:
        self._dealt = [0] * ranks

    def next(self, size: int) -> int:
        """Return the index of the rank that exports a parameter of `size` bytes."""
        turn = self._dealt.index(min(self._dealt))
        self._dealt[turn] += size
        return turn


class Exporter:
    """Exports this rank's shard of a model. Every method needs all ranks, which must iterate to the end.

    A weight that TransformerEngine stores in FP8 is exported as two matrices: its codes [N, K] and its scales
    [N / block, K / block]. stacked: experts that are stacked in the model are exported as stacks (`TensorTable.stack`).

    quantized_as: the spec of weights in FP8. cache: gives the tensor that engines get for a weight.
    """

    def __init__(self, definition: Model, quantized_as: TensorSpec, cache: WeightCache, layout: Layout) -> None:
        self._definition, self._spec, self._cache, self._layout = definition, quantized_as, cache, layout
        self._table = definition.tensors
        self._megatron, self._scales = MegatronWeights(self._table), MegatronWeights(self._table, quantized_as.group)
        self._base: SharedBase | None = None

    def share(self, model: GPTModel, stacked: bool = False) -> Iterator[NamedWeight]:
        """Yield the (HF name, tensor) pairs of this rank's shard. The shards of all ranks together are the checkpoint.

        A weight that TransformerEngine stores in FP8 is yielded in FP8. Use or copy the tensors before the next
        training step, because they may share memory with the parameters. All ranks must iterate to the end.
        """
        return self._share(self._served(model), model, stacked)

    def base(self, model: GPTModel) -> Iterator[NamedWeight]:
        """Yield this rank's shard of the weights, without separate or merged adapters."""
        return self._share(((name, weight, weight.detach()) for name, weight in self._weights(model)), model)

    def adapters(self, model: GPTModel, stacked: bool = False) -> Iterator[NamedWeight]:
        """Yield this rank's shard of the adapters."""
        adapters = ((name, part, part.detach()) for name, part in model.named_parameters() if is_adapter(name))
        return self._share(adapters, model, stacked)

    def _served(self, model: GPTModel) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (name, this rank's tensor, tensor that engines get for it)."""
        for name, held in self._weights(model):
            read_from_base = te_runtime.is_quantized(held) or (self._base is not None and frozen_of(held) is not None)
            yield name, held, held if read_from_base else self._cache.served(held)

    def _weights(self, model: GPTModel) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers that are tensors of the checkpoint. Adapters are not among them."""
        yield from ((name, parameter) for name, parameter in model.named_parameters() if not is_adapter(name))
        yield from self._buffers(model)

    def _buffers(self, model: GPTModel) -> Iterator[tuple[str, Tensor]]:
        whole = self.whole(model)
        return ((name, buffer) for name, buffer in model.named_buffers() if whole(name) in self._table.in_megatron)

    def whole(self, model: GPTModel) -> Callable[[str], str]:
        """Return a function that gives the name in the whole model for a name of this rank's weights, adapters and
        buffers."""
        layers = [layer.layer_number - 1 for layer in model.decoder.layers]
        first_expert = self._layout.ep_rank * (self._definition.sizes.experts // self._layout.ep_size)

        def name_of(name: str) -> str:
            in_layer = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda found: str(layers[int(found[0])]), name)
            numbered = r"(\.experts\.linear_fc[12]\.(?:weight|lora_a|lora_b))(\d+)$"
            return re.sub(numbered, lambda found: f"{found[1]}{first_expert + int(found[2])}", in_layer)

        return name_of

    @torch.no_grad()
    def _share(
        self, weights: Iterable[tuple[str, Tensor, Tensor]], model: GPTModel, stacked: bool = False
    ) -> Iterator[NamedWeight]:
        """Yield the (HF name, tensor) pairs of this rank's shard. All ranks must iterate to the end, to gather parts.

        weights: (name, this rank's part with Megatron's tags, tensor that engines get in place of the part). The order
        is the same on all ranks of a pipeline stage. Tensors that are in the shared base, where they are whole, are
        exported from the base.
        """
        at, whole = self._layout, self.whole(model)
        in_base = () if self._base is None else self._base.tensors
        dense, experts = Dealer(at.dp_size * at.tp_size), Dealer(at.expert_dp_size)
        parts = (
            (whole(each), local, served)
            for name, *sides in weights
            for (each, local), (_, served) in zip(*(matrices(name, side, stacked) for side in sides), strict=True)
        )
        for name, local, served in parts:
            row = self._megatron.rows(name)[0]
            if name in row.copies:
                continue  # the stage with the original exports it
            if row.expert is not None:
                mine, its_rank = experts.next(local.nbytes) == at.expert_dp_rank, at.tp_rank
            else:
                its_replica, its_rank = divmod(dense.next(local.nbytes), at.tp_size)
                mine = its_replica == at.dp_rank
            if not mine:
                continue
            if row.name in in_base:
                found = self._of_base(name, local)
            else:
                pieces = [self._pieces(local, served)]
                if at.tp_size > 1 and self._megatron.axis(name, local) is not None:
                    pieces = _gathered(pieces[0], its_rank, at.tp_group)
                found = self._tensors(name, local, pieces)
            if its_rank == at.tp_rank:
                yield from found

    def _of_base(self, name: str, held: Tensor) -> Iterator[NamedWeight]:
        assert self._base is not None
        for row in self._megatron.rows(name):
            yield row.name, self._base.fused([row], len(held) if held.dim() > 2 else 0)

    def _pieces(self, held: Tensor, served: Tensor) -> list[Tensor]:
        """Return the weight or, if TransformerEngine stores it in FP8, its codes and scales."""
        if not te_runtime.is_quantized(held):
            return [served]
        weight = te_runtime.quantized(held)
        assert weight.spec == self._spec, f"found a weight quantized as {weight.spec}, expected {self._spec}"
        return [weight.data.view(torch.uint8), weight.scale_inv.contiguous()]

    def _tensors(self, name: str, held: Tensor, parts: list[list[Tensor]]) -> Iterator[NamedWeight]:
        """Yield the checkpoint's tensors in a parameter. parts: the `_pieces` of each rank that has a part of it."""
        names, axis = [row.name for row in self._megatron.rows(name)], self._megatron.axis(name, held)
        cut = [
            side.cut(name, side.merge(name, piece, axis))
            for side, piece in zip((self._megatron, self._scales), zip(*parts, strict=True))
        ]
        for tensor_name, (values, *scales) in zip(names, zip(*cut, strict=True), strict=True):
            quantized = QuantizedTensor(values.view(self._spec.dtype), scales[0], self._spec) if scales else values
            yield tensor_name, quantized


def _gathered(pieces: list[Tensor], owner: int, group: dist.ProcessGroup) -> list[list[Tensor]]:
    """Gather the pieces of all ranks of `group` on rank `owner`. Other ranks get nothing. All ranks take part."""
    here = group.rank() == owner
    parts: list[list[Tensor]] = []
    for piece in pieces:
        received = [torch.empty_like(piece) for _ in range(group.size())] if here else []
        dist.gather(piece.contiguous(), received or None, group=group, group_dst=owner)
        parts.append(received)
    return [list(of_rank) for of_rank in zip(*parts, strict=True)]


class MegatronWeights:
    """Maps Megatron's parameters, whole or split over tensor-parallel ranks, to checkpoint tensors and back.

    Parameters have their names in the whole model. block: 1 to map weights. To map scales, the size of the weight's
    blocks, each of which has one scale.
    """

    def __init__(self, table: TensorTable, block: int = 1) -> None:
        self._table, self._block = table, block

    def rows(self, parameter: str) -> Sequence[TensorRow]:
        """Return the tensors in a parameter."""
        return self._table.in_megatron[parameter]

    def axis(self, parameter: str, held: Tensor) -> int | None:
        """Return the axis on which ranks split a parameter. None: each rank has the whole parameter.

        Experts are never split. They have Megatron's tag only for the gradient norm.
        """
        split = getattr(held, "tensor_model_parallel", False) and self.rows(parameter)[0].expert is None
        return held.partition_dim if split else None  # type: ignore[attr-defined]

    def cut(self, parameter: str, whole: Tensor) -> list[Tensor]:
        """Cut a parameter into its tensors."""
        return self._table.split(whole, self.rows(parameter), self._block)

    def fuse(self, parameter: str, tensors: Sequence[Tensor]) -> Tensor:
        """Undo `cut`."""
        return self._table.fuse(tensors, self.rows(parameter), self._block)

    def share(self, parameter: str, whole: Tensor, axis: int | None, ranks: int) -> Sequence[Tensor]:
        """Split a whole parameter on `axis` into the part of each of `ranks`."""
        rows = self.rows(parameter)
        if axis is None or ranks == 1:
            return [whole] * ranks
        if axis == 1 or rows[0].megatron.layout == "heads":
            return whole.chunk(ranks, axis)
        shares = zip(*(row.split(tensor, ranks) for row, tensor in zip(rows, self.cut(parameter, whole), strict=True)))
        return [self._table.fuse(share, rows, self._block, ranks) for share in shares]

    def merge(self, parameter: str, parts: Sequence[Tensor], axis: int | None) -> Tensor:
        """Undo `share`. Join the parts of the ranks to the whole parameter."""
        rows, ranks = self.rows(parameter), len(parts)
        if axis is None or ranks == 1:
            return parts[0]
        if axis == 1 or rows[0].megatron.layout == "heads":
            return torch.cat(list(parts), axis)
        cut = [self._table.split(part, rows, self._block, ranks) for part in parts]
        shares = zip(rows, zip(*cut, strict=True), strict=True)
        return self.fuse(parameter, [row.join(share) for row, share in shares])
