"""Computes the short causal convolution (`numerics.ops.short_conv`). The torch definition computes the gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import cast, dense_rows
from fp8rl.numerics.kernels.attention.chunks import find_sequence

_ROWS, _CHANNELS = 16, 128  # of a program
_SEQUENCES = 256  # among which it finds its own, at least: one compiled kernel for most batches


def paged_causal_conv(
    x: Tensor, weight: Tensor, cache: Tensor, slots: Tensor, lengths: Tensor, begun: Tensor
) -> Tensor:
    """Compute `numerics.ops.paged_causal_conv`. A program reads a slot's rows before it writes the new rows there."""
    x, out = dense_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        tiles = len(lengths) + -(-len(x) // _ROWS)
        _kernel[(tiles, -(-x.shape[1] // _CHANNELS))](
            *(x, weight.contiguous(), out, cache, slots, lengths, begun, len(lengths), x.shape[1], x.stride(0)),
            *cache.stride(),
            TAPS=weight.shape[1],
            HELD=triton.next_power_of_2(weight.shape[1] - 1),
            SEQUENCES=max(_SEQUENCES, triton.next_power_of_2(len(lengths))),
            ROWS=_ROWS,
            CHANNELS=_CHANNELS,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["sequences"])
def _kernel(
    x_ptr, weight_ptr, out_ptr, cache_ptr, slots_ptr, lengths_ptr, begun_ptr, sequences, channels, stride,
    slot_stride, row_stride, channel_stride,
    TAPS: tl.constexpr, HELD: tl.constexpr, SEQUENCES: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    sequence, tile, first, length = find_sequence(lengths_ptr, sequences, SEQUENCES, 1, ROWS)
    if sequence < sequences:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
        begun = tl.load(begun_ptr + sequence) != 0
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        real = channel < channels
        position = tile * ROWS + tl.arange(0, ROWS)
        inside = (position < length)[:, None] & real[None, :]
        cache = cache_ptr + slot * slot_stride + channel[None, :] * channel_stride
        x = x_ptr + channel[None, :]
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        for tap in tl.static_range(TAPS):
            source = (position - (TAPS - 1) + tap)[:, None]
            here = tl.load(x + (first + source).to(tl.int64) * stride, mask=inside & (source >= 0), other=0.0)
            held = tl.load(cache + (source + TAPS - 1) * row_stride, mask=inside & (source < 0) & begun, other=0.0)
            row = tl.where(source >= 0, here.to(tl.float32), held.to(tl.float32))
            weight = tl.load(weight_ptr + channel * TAPS + tap, mask=real, other=0.0).to(tl.float32)
            total += row * weight[None, :]
        result = cast(total * (1.0 / (1.0 + tl.exp(-total))), out_ptr.dtype.element_ty)
        where = out_ptr + (first + position).to(tl.int64)[:, None] * channels + channel[None, :]
        tl.store(where, result, mask=inside)
        if tile == 0:  # the program that reads the slot
            number = tl.arange(0, HELD)
            last = (length - (TAPS - 1) + number)[:, None]
            wanted = (number < TAPS - 1)[:, None] & real[None, :]
            fresh = tl.load(x + (first + last).to(tl.int64) * stride, mask=wanted & (last >= 0), other=0.0)
            older = tl.load(cache + (last + TAPS - 1) * row_stride, mask=wanted & (last < 0) & begun, other=0.0)
            rows = tl.where(last >= 0, fresh.to(tl.float32), older.to(tl.float32))
            tl.debug_barrier()
            tl.store(cache + number[:, None] * row_stride, cast(rows, cache_ptr.dtype.element_ty), mask=wanted)
