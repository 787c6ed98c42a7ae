"""The all-gather of updated weights as FP8 codes, in the format that the products take.

A rank has updated a part of a flat buffer, and a part's end may lie within a block of 128 x 128. So the ranks first
agree on each block's largest value (an all-reduce of four bytes per block), then send their codes. Dequantized they are
written in place of the BF16 values. With power-of-two scales they are exact in BF16, and quantizing them again gives
the same values, so that a forward cannot tell them from weights that it has quantized itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8rl.numerics.quantize import block_amax, dequantize, quantize_by, scale_shape
from fp8rl.numerics.rounding import scale_from_amax
from fp8rl.numerics.spec import TensorSpec

Part = tuple[int, int]
"""First element of a part of a buffer, and one past its last."""


def travels_in_fp8(spec: TensorSpec) -> bool:
    """Return True if weights of this spec may be sent quantized: the values survive another quantization."""
    return spec.format == "e4m3" and spec.granularity == "block" and spec.scale == "pow2" and spec.rounding == "nearest"


@dataclass(frozen=True)
class _Weight:
    """A parameter that is sent as codes."""

    data: Tensor
    spec: TensorSpec
    start: int
    """The offset of its first element in the buffer."""

    def within(self, part: Part) -> slice:
        """Return its elements in this part of the buffer."""
        size = self.data.numel()
        return slice(*(min(max(end - self.start, 0), size) for end in part))


@torch.no_grad()
def gather_weights(buffer: Tensor, in_fp8: Iterable[tuple[nn.Parameter, TensorSpec]], ranks: dist.ProcessGroup) -> int:
    """Fill `buffer` [ranks * n] with every rank's part of it, and return the bytes that this rank has sent.

    in_fp8: parameters [N, K], or stacks of such, that are views of the buffer, and their specs. All else is sent as it
    is.
    """
    begins = int(buffer.storage_offset())
    of_each = ((matrix, spec) for p, spec in in_fp8 for matrix in p.data.view(-1, *p.shape[-2:]))
    held = [_Weight(matrix, spec, int(matrix.storage_offset()) - begins) for matrix, spec in of_each]
    weights = sorted(held, key=lambda weight: weight.start)
    starts, stops = [weight.start for weight in weights], [weight.start + weight.data.numel() for weight in weights]
    gaps = [gap for gap in zip([0, *stops], [*starts, buffer.numel()], strict=True) if gap[0] < gap[1]]
    size = buffer.numel() // ranks.size()
    parts = [(rank * size, (rank + 1) * size) for rank in range(ranks.size())]
    own = parts[ranks.rank()]

    parted = []  # the largest value of each block in what this rank has updated; 0 where it has nothing
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

    codes = [torch.empty(weight.data.shape, dtype=weight.spec.dtype, device=buffer.device) for weight in weights]
    for weight, amax, whole in zip(weights, amaxes, codes, strict=True):
        mine = weight.within(own)
        if mine.start < mine.stop:
            data = quantize_by(_only(weight, mine), weight.spec, amax).data
            whole.view(-1)[mine] = data.view(-1)[mine]

    def pieces(part: Part) -> list[Tensor]:
        """Return the bytes that the owner of a part sends, as views of the buffer."""
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
    for weight, amax, whole in zip(weights, amaxes, codes, strict=True):
        spec = weight.spec
        scale = scale_from_amax(amax, spec.dtype, spec.scale, buffer.dtype)
        dequantize(whole, 1.0 / scale, spec, out=weight.data)
    others = ranks.size() - 1
    return messages[ranks.rank()].nbytes * others + agreed.nbytes * 2 * others // ranks.size()


def _only(weight: _Weight, elements: slice) -> Tensor:
    """Return the weight with zeros outside of these elements."""
    if elements == slice(0, weight.data.numel()):
        return weight.data
    only = torch.zeros_like(weight.data)
    only.view(-1)[elements] = weight.data.view(-1)[elements]
    return only
