"""Rotary position embedding: the ops of `numerics.ops.rope`, for any position without a table.

Angles are products in FP64, brought into one turn before their sine and cosine are taken in FP32, so that late
positions lose nothing.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import cast, dense_rows
from fp8rl.numerics.ops.rope import Scaling, frequencies

_HEADS = 8  # of one program
_TURN = tl.constexpr(2 * math.pi)


def rope(
    x: Tensor, positions: Tensor, theta: float, rotary_dim: int | None = None, scaling: Scaling | None = None
) -> Tensor:
    """`numerics.ops.rope`."""
    return _Rope.apply(x, positions, theta, rotary_dim or x.shape[-1], scaling, False)


def rope_pairs(x: Tensor, positions: Tensor, theta: float, scaling: Scaling | None = None) -> Tensor:
    """`numerics.ops.rope_pairs`."""
    return _Rope.apply(x, positions, theta, x.shape[-1], scaling, True)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, positions: Tensor, theta: float, rotary_dim: int, scaling: Scaling | None, pairs: bool
    ) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.form = theta, rotary_dim, scaling, pairs
        return _rotate(x, positions, ctx.form, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return _rotate(grads[0], ctx.saved_tensors[0], ctx.form, -1.0), None, None, None, None, None


def _rotate(x: Tensor, positions: Tensor, form: tuple[float, int, Scaling | None, bool], direction: float) -> Tensor:
    """form: theta, rotated channels, the scaling of the context, and whether pairs are neighbours."""
    theta, rotary_dim, scaling, pairs = form
    batch, length, heads, dim = x.shape
    tokens = batch * length
    flat = dense_rows(x).reshape(tokens, heads, dim)
    out = torch.empty(tokens, heads, dim, dtype=x.dtype, device=x.device)
    if out.numel():
        _kernel[tokens, triton.cdiv(heads, _HEADS)](
            *(flat, positions.reshape(-1).contiguous(), _frequencies(theta, rotary_dim, scaling, x.device), out),
            *(heads, flat.stride(0), flat.stride(1), direction),
            HALF=rotary_dim // 2,
            REST=dim - rotary_dim,
            PAIRS=pairs,
            BLOCK=triton.next_power_of_2(rotary_dim // 2),
            HEADS=_HEADS,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out.view(x.shape)


@functools.lru_cache(maxsize=8)
def _frequencies(theta: float, dim: int, scaling: Scaling | None, device: torch.device) -> Tensor:
    """Return `frequencies` on the kernel's device."""
    return frequencies(theta, dim, scaling).to(device)


@triton.jit(do_not_specialize=["heads"])
def _kernel(
    x_ptr, positions_ptr, frequencies_ptr, out_ptr, heads, token_stride, head_stride, direction,
    HALF: tl.constexpr, REST: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """PAIRS: neighbours turn together, else the channels of the first half with those of the second."""
    EACH: tl.constexpr = 2 if PAIRS else 1
    PARTNER: tl.constexpr = 1 if PAIRS else HALF
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, BLOCK)
    angle = tl.load(positions_ptr + token).to(tl.float64) * tl.load(frequencies_ptr + half, mask=half < HALF, other=0.0)
    angle = (angle - tl.floor(angle / _TURN) * _TURN).to(tl.float32)
    cos, sin = tl.cos(angle)[None, :], (tl.sin(angle) * direction)[None, :]
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    inside = (head < heads) & (half < HALF)[None, :]
    at = x_ptr + token * token_stride + head * head_stride + EACH * half[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + PARTNER, mask=inside, other=0.0).to(tl.float32)
    start = out_ptr + (token * heads + head) * (2 * HALF + REST)
    to = start + EACH * half[None, :]
    tl.store(to, cast(first * cos - second * sin, out_ptr.dtype.element_ty), mask=inside)
    tl.store(to + PARTNER, cast(second * cos + first * sin, out_ptr.dtype.element_ty), mask=inside)
    for passed in range(2 * HALF, 2 * HALF + REST, BLOCK):
        column = passed + half[None, :]
        inside = (head < heads) & (column < 2 * HALF + REST)
        whole = tl.load(x_ptr + token * token_stride + head * head_stride + column, mask=inside)
        tl.store(start + column, whole, mask=inside)
