"""Sends gradients and updated weights between data-parallel ranks in the formats of the spec.

Megatron keeps all gradients of a rank in a few flat buffers. Each rank sums and updates one part of every buffer.
Megatron's reduce-scatter sums FP32 in transit. A narrower format cannot be summed in transit. With such a format every
rank sends each part to the rank that sums it (an all-to-all). This rank sums in FP32, in rank order.

Updated weights may be sent as FP8 codes, in the format that the products take. A part of a buffer may end within a
block of 128 x 128. So the ranks first agree on each block's largest value (an all-reduce of four bytes per block), then
send their codes. The receiver writes the dequantized values in place of the BF16 weights. With power-of-two scales
these values are exact in BF16, and quantizing them again gives the same values. So a forward pass has the same result
as with weights that it quantizes itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup, shard_buffer
from torch import Tensor, nn

from fp8rl.numerics.backend.dispatch import note
from fp8rl.numerics.quantize import QuantizedTensor, block_amax, quantize, quantize_by, scale_shape
from fp8rl.numerics.rounding import scale_from_amax
from fp8rl.numerics.spec import TensorSpec
from fp8rl.trainer.config import GradientWire
from fp8rl.trainer.megatron.patches import become

Narrow = Literal["bf16", "e4m3", "e5m2"]
"""Wire formats that cannot be summed in transit."""
SPECS: dict[str, TensorSpec] = {wire: TensorSpec(format=wire, scale="fp32") for wire in ("e4m3", "e5m2")}
"""The quantization of gradients to send. A scale covers 128 consecutive numbers of a buffer, also across parameters."""
Part = tuple[int, int]
"""A part of a buffer: the index of its first element, and of the element after its last."""
InFp8 = Callable[[], Mapping[nn.Parameter, TensorSpec]]
"""Returns the parameters to send as FP8 codes now, each with its spec."""


def install(model: DistributedDataParallel, wire: GradientWire, in_fp8: InFp8) -> None:
    """Make a wrapped model send gradients as `wire`, and the weights of `in_fp8` in FP8."""
    for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
        become(group, BucketGroup)
        group.wire, group.in_fp8 = wire, in_fp8


class BucketGroup(_ParamAndGradBucketGroup):
    """Sends the gradients and weights of some of a model's buffers between the ranks that share the buffers."""

    wire: GradientWire
    in_fp8: InFp8

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        ranks = self.intra_distributed_optimizer_instance_group
        if self.wire == "fp32" or ranks.size() == 1:
            note("gradient.wire", *(bucket.grad_data for bucket in self.buckets))
            super().start_grad_sync(force_all_reduce)
            return
        for bucket in self.buckets:
            assert bucket.gradient_scaling_factor == 1.0, "the objective has its own denominators"
            own_part = shard_buffer(bucket.grad_data, ranks.size())[ranks.rank()]
            own_part.copy_(reduce_scatter(bucket.grad_data, self.wire, ranks))

    def start_param_sync(self, force_sync: bool = False) -> None:
        ranks = self.intra_distributed_optimizer_instance_group
        in_fp8 = self.in_fp8() if ranks.size() > 1 else {}
        if not any(parameter in in_fp8 for parameter in self.params):
            note("wire.weights", *(bucket.param_data for bucket in self.buckets))
            super().start_param_sync(force_sync)
            return
        for bucket in self.buckets:
            chosen = [(parameter, in_fp8[parameter]) for parameter in bucket.params_list if parameter in in_fp8]
            gather_weights(bucket.param_data, chosen, ranks)


def reduce_scatter(gradients: Tensor, wire: Narrow, ranks: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the sum over all ranks, FP32 [n].

    gradients: FP32 [ranks * n]. Every part is rounded, also the rank's own. So the sum does not depend on which rank
    computes it. In FP8, a number that is not finite becomes NaN, because saturation would hide it.
    """
    parts = gradients.view(ranks.size(), -1)
    if wire == "bf16":
        payload = parts.bfloat16()
        values = _exchanged(payload, ranks).float()
    else:
        quantized = quantize(torch.where(parts.isfinite(), parts, math.nan), SPECS[wire])
        payload = quantized.data
        codes, scale_inv = _exchanged(payload, ranks), _exchanged(quantized.scale_inv.contiguous(), ranks)
        values = QuantizedTensor(codes, scale_inv, quantized.spec).dequantize()
    note("gradient.wire", payload)
    total = values[0]
    for other in values[1:]:
        total = total + other
    return total


def _exchanged(payload: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Send row r of payload to rank r. Row r of the result [ranks, ...] is from rank r."""
    received = torch.empty_like(payload)
    dist.all_to_all_single(received.view(torch.uint8), payload.view(torch.uint8), group=ranks)
    return received


@dataclass(frozen=True)
class _Weight:
    """A matrix that is sent as codes."""

    data: Tensor
    spec: TensorSpec
    start: int
    """The offset of the matrix's first element in the buffer."""

    def within(self, part: Part) -> slice:
        """Return which elements of the matrix are in this part of the buffer."""
        size = self.data.numel()
        return slice(*(min(max(end - self.start, 0), size) for end in part))


@torch.no_grad()
def gather_weights(buffer: Tensor, in_fp8: Iterable[tuple[nn.Parameter, TensorSpec]], ranks: dist.ProcessGroup) -> None:
    """Fill `buffer` [ranks * n] with the parts that the ranks have updated.

    in_fp8: the parameters [N, K] or [experts, N, K], views of the buffer, to send as FP8 codes, and their specs.
    """
    begins = int(buffer.storage_offset())
    of_each = ((matrix, spec) for p, spec in in_fp8 for matrix in p.data.view(-1, *p.shape[-2:]))
    weights = [_Weight(matrix, spec, int(matrix.storage_offset()) - begins) for matrix, spec in of_each]
    weights.sort(key=lambda weight: weight.start)
    size = buffer.numel() // ranks.size()
    parts = [(rank * size, (rank + 1) * size) for rank in range(ranks.size())]
    updated = parts[ranks.rank()]
    amaxes = _agree_on_amaxes(weights, updated, ranks)
    codes = [torch.empty(weight.data.shape, dtype=weight.spec.dtype, device=weight.data.device) for weight in weights]
    for weight, amax, whole in zip(weights, amaxes, codes, strict=True):
        mine = weight.within(updated)
        if mine.start < mine.stop:
            data = quantize_by(_only(weight, mine), weight.spec, amax).data
            whole.view(-1)[mine] = data.view(-1)[mine]
    note("wire.weights", *codes)
    _exchange(buffer, weights, codes, parts, ranks)
    for weight, amax, whole in zip(weights, amaxes, codes, strict=True):
        scale = scale_from_amax(amax, weight.spec.dtype, weight.spec.scale, weight.data.dtype)
        QuantizedTensor(whole, 1.0 / scale, weight.spec).dequantize(out=weight.data)


def _agree_on_amaxes(weights: Sequence[_Weight], own: Part, ranks: dist.ProcessGroup) -> list[Tensor]:
    """Return the largest value of each block of each weight over all ranks.

    own: the part of the buffer that this rank has updated.
    """
    parted = []  # of what this rank has updated; 0 where it has nothing
    for weight in weights:
        mine = weight.within(own)
        if mine.start == mine.stop:
            shape = scale_shape(weight.data.shape, weight.spec)
            parted.append(weight.data.new_zeros(shape, dtype=torch.float32))
        else:
            parted.append(block_amax(_only(weight, mine), weight.spec))
    agreed = torch.cat([amax.flatten() for amax in parted])
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=ranks)
    flat = agreed.split([amax.numel() for amax in parted])
    return [whole.view(amax.shape) for whole, amax in zip(flat, parted, strict=True)]


def _exchange(
    buffer: Tensor, weights: Sequence[_Weight], codes: Sequence[Tensor], parts: Sequence[Part], ranks: dist.ProcessGroup
) -> None:
    """Exchange the codes, and the elements of the buffer that are sent unchanged. Then all ranks have all of them."""
    starts, stops = [weight.start for weight in weights], [weight.start + weight.data.numel() for weight in weights]
    gaps = [gap for gap in zip([0, *stops], [*starts, buffer.numel()], strict=True) if gap[0] < gap[1]]

    def pieces(part: Part) -> list[Tensor]:
        """Return what the rank with this part sends, as views of the codes and of the buffer."""
        of_codes = [whole.view(torch.uint8).view(-1)[weight.within(part)] for weight, whole in zip(weights, codes)]
        cut = [(max(first, part[0]), min(last, part[1])) for first, last in gaps]
        return of_codes + [buffer[first:last].view(torch.uint8) for first, last in cut if first < last]

    messages = [torch.cat(pieces(part)) for part in parts]
    sends = [dist.broadcast(m, group_src=rank, group=ranks, async_op=True) for rank, m in enumerate(messages)]
    for send, message, part in zip(sends, messages, parts, strict=True):
        send.wait()
        places = pieces(part)
        for place, received in zip(places, message.split([len(place) for place in places]), strict=True):
            place.copy_(received)


def _only(weight: _Weight, elements: slice) -> Tensor:
    """Return the weight with zeros outside of these elements."""
    if elements == slice(0, weight.data.numel()):
        return weight.data
    only = torch.zeros_like(weight.data)
    only.view(-1)[elements] = weight.data.view(-1)[elements]
    return only
