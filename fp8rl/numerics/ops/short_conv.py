"""Defines the short causal convolution before linear attention: each channel over the last few tokens, with SiLU.

A token reads its own row and the W - 1 rows before it in its sequence. So a sequence goes on from its last W - 1 input
rows alone, and its bits do not depend on how it was cut into calls. Taps are multiplied and added one after the other,
the oldest first. Taps and SiLU are in FP32, and the result is rounded once to x's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.backend.dispatch import Probes, composed, op
from fp8rl.numerics.ops.gates import sigmoid, silu


@composed
def causal_conv(x: Tensor, weight: Tensor, lengths: Tensor) -> Tensor:
    """Compute the convolution of whole sequences that are end to end. Each begins after zeros.

    x [T, C]; weight [C, W]; lengths int64 [B], 0 or more each, with the sum T. Returns [T, C] in x's dtype.
    """
    return _CausalConv.apply(x, weight, lengths)


@op
def paged_causal_conv(
    x: Tensor, weight: Tensor, cache: Tensor, slots: Tensor, lengths: Tensor, begun: Tensor
) -> Tensor:
    """Compute `causal_conv` of sequences whose last rows are in slots of a cache, and store the new last rows there.

    cache [slots, W - 1, C], in x's dtype; slots int64 [B], all different; begun bool [B], True if the sequence had
    tokens before, so that its slot is read; otherwise it begins after zeros. Returns [T, C]. No gradient.
    """
    own, last = _places(lengths, weight.shape[1] - 1, len(x))
    joined = _joined(x, torch.where(begun[:, None, None], cache[slots], 0), own)
    cache[slots] = joined[last]
    return silu(_taps(joined.float(), weight.float()))[own - weight.shape[1] + 1].to(x.dtype)


class _CausalConv(torch.autograd.Function):
    """Computes the convolution over a cache with a slot for each sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, lengths)
        cache = x.new_empty(len(lengths), weight.shape[1] - 1, x.shape[1])
        slots = torch.arange(len(lengths), device=x.device)
        return paged_causal_conv(x, weight, cache, slots, lengths, torch.zeros_like(slots, dtype=torch.bool))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, lengths = ctx.saved_tensors
        taps, wide = weight.shape[1], weight.float()
        own, _ = _places(lengths, taps - 1, len(x))
        joined = _joined(x, x.new_zeros(len(lengths), taps - 1, x.shape[1]), own).float()
        before = _taps(joined, wide)
        open_ = sigmoid(before)
        # Rows behind the end of one sequence and before the next have results, too, which nobody reads.
        dy = torch.zeros_like(before).index_copy_(0, own - taps + 1, grads[0].float())
        dsum = dy * open_ * (1 + before * (1 - open_))
        djoined, dweight = torch.zeros_like(joined), torch.empty_like(wide)
        for tap in range(taps):
            djoined[tap : tap + len(dsum)] += dsum * wide[:, tap]
            dweight[:, tap] = (dsum * joined[tap : tap + len(dsum)]).sum(0)
        return djoined[own].to(x.dtype), dweight.to(weight.dtype), None


def _places(lengths: Tensor, held: int, count: int) -> tuple[Tensor, Tensor]:
    """Return indices into the rows after `held` rows are put before each sequence: the indices of the tokens [T], and
    of each sequence's last rows [B, held]."""
    numbers = torch.arange(1, len(lengths) + 1, device=lengths.device)
    sequence = numbers.repeat_interleave(lengths, output_size=count)
    own = torch.arange(count, device=lengths.device) + held * sequence
    ends = lengths.cumsum(0) + held * numbers
    return own, ends[:, None] - held + torch.arange(held, device=lengths.device)


def _joined(x: Tensor, rows: Tensor, own: Tensor) -> Tensor:
    """Insert the rows before each sequence of x: [T + B * held, C]. own: the indices of x's rows in the result."""
    joined = x.new_empty(len(x) + rows.shape[0] * rows.shape[1], x.shape[1])
    others = torch.ones(len(joined), dtype=torch.bool, device=x.device).index_fill_(0, own, False)
    joined[own] = x
    joined[others] = rows.flatten(0, 1)
    return joined


def _taps(joined: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted sum of each row and the W - 1 rows before it, [rows - W + 1, C]."""
    count = len(joined) - weight.shape[1] + 1
    total = joined[:count] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        total = total + joined[tap : tap + count] * weight[:, tap]
    return total


def _trial(random: Callable[..., Tensor], count: int) -> dict[str, Callable[[int], Tensor]]:
    x, weight = random(count, 96), random(96, 4)

    return {"causal_conv": lambda n: causal_conv(x[:n], weight, torch.tensor([n], device=x.device))}


PROBES = Probes(rows=_trial)
