"""The formats in which data-parallel ranks send each other gradients to sum and updated weights.

Megatron keeps all gradients of a rank in a few flat buffers and gives each rank a part of every buffer to sum and to
update. Its reduce-scatter sums in transit, in FP32. A narrower format cannot be summed in transit. There every rank
sends every other rank its part (an all-to-all), and the receiver sums in FP32, in rank order.

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
from fp8rl.numerics.quantize import block_amax, dequantize, quantize, quantize_by, scale_shape
from fp8rl.numerics.rounding import scale_from_amax
from fp8rl.numerics.spec import TensorSpec
from fp8rl.trainer.config import GradientWire
from fp8rl.trainer.megatron.patches import become

Narrow = Literal["bf16", "e4m3", "e5m2"]
"""Wire formats that cannot be summed in transit."""
SPECS: dict[str, TensorSpec] = {wire: TensorSpec(format=wire, scale="fp32") for wire in ("e4m3", "e5m2")}
"""The quantization of gradients for a wire: groups of 1 x 128 along the buffer, across parameters."""
Part = tuple[int, int]
"""A part of a buffer: its first element, and one past its last."""
InFp8 = Callable[[], Mapping[nn.Parameter, TensorSpec]]
"""Returns the parameters that are now to be sent as FP8 codes, with the spec of each."""


@dataclass
class Traffic:
    """Bytes that this rank has sent to its data-parallel peers since the start, as a ring algorithm would send them."""

    gradients: int = 0
    """Bytes of gradients: (ranks - 1) parts of a buffer for each sum."""
    weights: int = 0
    """Bytes of weights: (ranks - 1) parts of a buffer for each gather."""


def install(model: DistributedDataParallel, wire: GradientWire, in_fp8: InFp8) -> Traffic:
    """Send the gradients of a wrapped model as `wire`, and some weights in FP8. Return the counter of their bytes."""
    traffic = Traffic()
    for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
        become(group, BucketGroup)
        group.wire, group.in_fp8, group.traffic = wire, in_fp8, traffic
    return traffic


class BucketGroup(_ParamAndGradBucketGroup):
    """Some of the buffers of a model, and the ranks that share them."""

    wire: GradientWire
    in_fp8: InFp8
    traffic: Traffic

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        ranks = self.intra_distributed_optimizer_instance_group
        if self.wire == "fp32" or ranks.size() == 1:
            note("gradient.wire", *(bucket.grad_data for bucket in self.buckets))
            self.traffic.gradients += sum(_sent(bucket.grad_data.nbytes, ranks) for bucket in self.buckets)
            super().start_grad_sync(force_all_reduce)
            return
        for bucket in self.buckets:
            assert bucket.gradient_scaling_factor == 1.0, "the objective has its own denominators"
            total, sent = reduce_scatter(bucket.grad_data, self.wire, ranks)
            shard_buffer(bucket.grad_data, ranks.size())[ranks.rank()].copy_(total)
            self.traffic.gradients += sent

    def start_param_sync(self, force_sync: bool = False) -> None:
        ranks = self.intra_distributed_optimizer_instance_group
        in_fp8 = self.in_fp8() if ranks.size() > 1 else {}
        if not any(parameter in in_fp8 for parameter in self.params):
            note("wire.weights", *(bucket.param_data for bucket in self.buckets))
            self.traffic.weights += sum(_sent(bucket.param_data.nbytes, ranks) for bucket in self.buckets)
            super().start_param_sync(force_sync)
            return
        for bucket in self.buckets:
            chosen = [(parameter, in_fp8[parameter]) for parameter in bucket.params_list if parameter in in_fp8]
            self.traffic.weights += gather_weights(bucket.param_data, chosen, ranks)


def reduce_scatter(gradients: Tensor, wire: Narrow, ranks: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Return this rank's part of the sum over all ranks, FP32 [n], and the bytes that it has sent.

    gradients: FP32 [ranks * n]. Each rank's contribution is rounded, also a rank's contribution to its own part. So the
    sum does not depend on which rank computes it. A number that is not finite becomes NaN in FP8, since saturation
    would hide it.
    """
    parts = gradients.view(ranks.size(), -1)
    if wire == "bf16":
        payloads = [parts.bfloat16()]
        values = _exchanged(payloads[0], ranks).float()
    else:
        quantized = quantize(torch.where(parts.isfinite(), parts, math.nan), SPECS[wire])
        payloads = [quantized.data, quantized.scale_inv.contiguous()]
        codes, scale_inv = (_exchanged(payload, ranks) for payload in payloads)
        values = dequantize(codes, scale_inv, quantized.spec)
    note("gradient.wire", payloads[0])
    total = values[0]
    for other in values[1:]:
        total = total + other
    return total, sum(_sent(payload.nbytes, ranks) for payload in payloads)


def _exchanged(payload: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Send row r of payload to rank r. Row r of the result [ranks, ...] is what rank r sent."""
    received = torch.empty_like(payload)
    dist.all_to_all_single(received.view(torch.uint8), payload.view(torch.uint8), group=ranks)
    return received


def _sent(nbytes: int, ranks: dist.ProcessGroup) -> int:
    """Count the bytes that a rank sends of a buffer of `nbytes`: all but its own part."""
    return nbytes * (ranks.size() - 1) // ranks.size()


@dataclass(frozen=True)
class _Weight:
    """A matrix that is sent as codes."""

    data: Tensor
    spec: TensorSpec
    start: int
    """The offset of the matrix's first element in the buffer."""

    def within(self, part: Part) -> slice:
        """Return the elements of the matrix that are in this part of the buffer."""
        size = self.data.numel()
        return slice(*(min(max(end - self.start, 0), size) for end in part))


@torch.no_grad()
def gather_weights(buffer: Tensor, in_fp8: Iterable[tuple[nn.Parameter, TensorSpec]], ranks: dist.ProcessGroup) -> int:
    """Fill `buffer` [ranks * n] with every rank's part of it, and return the bytes that this rank has sent.

    in_fp8: parameters [N, K] or [experts, N, K], views of the buffer, and their specs. The rest is sent unchanged.
    """
    weights = _weights_in(buffer, in_fp8)
    size = buffer.numel() // ranks.size()
    parts = [(rank * size, (rank + 1) * size) for rank in range(ranks.size())]
    updated = parts[ranks.rank()]
    amaxes, sent = _agree_on_amaxes(weights, updated, ranks)
    codes = _quantize_own(weights, amaxes, updated)
    note("wire.weights", *codes)
    sent += _exchange(buffer, weights, codes, parts, ranks)
    _dequantize_in_place(weights, amaxes, codes)
    return sent


def _weights_in(buffer: Tensor, in_fp8: Iterable[tuple[nn.Parameter, TensorSpec]]) -> list[_Weight]:
    """Return the matrices that are sent as codes, in the order of the buffer."""
    begins = int(buffer.storage_offset())
    of_each = ((matrix, spec) for p, spec in in_fp8 for matrix in p.data.view(-1, *p.shape[-2:]))
    matrices = [_Weight(matrix, spec, int(matrix.storage_offset()) - begins) for matrix, spec in of_each]
    return sorted(matrices, key=lambda weight: weight.start)


def _agree_on_amaxes(weights: Sequence[_Weight], own: Part, ranks: dist.ProcessGroup) -> tuple[list[Tensor], int]:
    """Return the largest value of each block of each weight over all ranks, and the bytes that this rank has sent.

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
    amaxes = [whole.view(amax.shape) for whole, amax in zip(flat, parted, strict=True)]
    return amaxes, agreed.nbytes * 2 * (ranks.size() - 1) // ranks.size()


def _quantize_own(weights: Sequence[_Weight], amaxes: Sequence[Tensor], own: Part) -> list[Tensor]:
    """Return the codes of each weight. Only this rank's part of them is filled."""
    codes = [torch.empty(weight.data.shape, dtype=weight.spec.dtype, device=weight.data.device) for weight in weights]
    for weight, amax, whole in zip(weights, amaxes, codes, strict=True):
        mine = weight.within(own)
        if mine.start < mine.stop:
            data = quantize_by(_only(weight, mine), weight.spec, amax).data
            whole.view(-1)[mine] = data.view(-1)[mine]
    return codes


def _exchange(
    buffer: Tensor, weights: Sequence[_Weight], codes: Sequence[Tensor], parts: Sequence[Part], ranks: dist.ProcessGroup
) -> int:
    """Fill the codes, and the elements of the buffer that are sent unchanged, with every rank's part. Return the number
    of bytes that this rank has sent."""
    starts, stops = [weight.start for weight in weights], [weight.start + weight.data.numel() for weight in weights]
    gaps = [gap for gap in zip([0, *stops], [*starts, buffer.numel()], strict=True) if gap[0] < gap[1]]

    def pieces(part: Part) -> list[Tensor]:
        """Return the bytes that the owner of a part sends, as views of the codes and of the buffer."""
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
    return messages[ranks.rank()].nbytes * (ranks.size() - 1)


def _dequantize_in_place(weights: Sequence[_Weight], amaxes: Sequence[Tensor], codes: Sequence[Tensor]) -> None:
    """Write the codes' values in place of the weights."""
    for weight, amax, whole in zip(weights, amaxes, codes, strict=True):
        spec = weight.spec
        scale = scale_from_amax(amax, spec.dtype, spec.scale, weight.data.dtype)
        dequantize(whole, 1.0 / scale, spec, out=weight.data)


def _only(weight: _Weight, elements: slice) -> Tensor:
    """Return the weight with zeros outside of these elements."""
    if elements == slice(0, weight.data.numel()):
        return weight.data
    only = torch.zeros_like(weight.data)
    only.view(-1)[elements] = weight.data.view(-1)[elements]
    return only
