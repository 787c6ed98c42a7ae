"""Computes rotary position embeddings (`numerics.ops.rope`) for any position, without a table.

Angles are products in FP64. They are reduced to one turn before their sine and cosine are taken in FP32, so that late
positions lose no accuracy.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import GROUP, cast, dense_rows
from fp8rl.numerics.kernels.norm import inverse_rms_of, rms_norm_backward, times_weight
from fp8rl.numerics.ops.rope import HeadNorms, NewSlots, Scaling, frequencies

_HEADS = 8  # of one program
_TURN = tl.constexpr(2 * math.pi)


_Rotation = tuple[Tensor, float, int, Scaling | None]
"""Positions [T], theta, the number of rotated channels, and the method of a lengthened context."""


def rotated(
    x: Tensor,
    positions: Tensor,
    theta: float,
    rotary_dim: int,
    scaling: Scaling | None,
    pairs: bool,
    back: bool = False,
) -> Tensor:
    flat = x.flatten(0, 1)
    return _launch(flat, flat[:, :0], (positions.flatten(), theta, rotary_dim, scaling), pairs, back)[0].view(x.shape)


def rope_heads(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    theta: float,
    rotary_dim: int | None = None,
    scaling: Scaling | None = None,
    norms: HeadNorms | None = None,
    cache: NewSlots | None = None,
) -> tuple[Tensor, Tensor]:
    rotation = positions, theta, rotary_dim or q.shape[2], scaling
    weights = (None, None) if norms is None else (norms.queries, norms.keys)
    return _Heads.apply(q, k, *weights, rotation, norms, cache)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, rotation: _Rotation, norms: Any, cache: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*((q, k, q_weight, k_weight) if norms is not None else (None,) * 4))
        ctx.rotation, ctx.norms = rotation, norms
        return _launch(q, k, rotation, norms=norms, cache=cache)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, q_weight, k_weight = ctx.saved_tensors
        dq, dk = _launch(grads[0], grads[1], ctx.rotation, back=True)
        dq_weight = dk_weight = None
        if ctx.norms is not None:
            dq, dq_weight = rms_norm_backward(dq, q, q_weight, ctx.norms.eps)
            dk, dk_weight = rms_norm_backward(dk, k, k_weight, ctx.norms.eps)
        return dq, dk, dq_weight, dk_weight, None, None, None


def _launch(
    q: Tensor,
    k: Tensor,
    rotation: _Rotation,
    pairs: bool = False,
    back: bool = False,
    norms: HeadNorms | None = None,
    cache: NewSlots | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [T, heads, D]. A program has some heads of a token, queries or keys."""
    (tokens, heads, dim), key_heads, (positions, theta, rotary_dim, scaling) = q.shape, k.shape[1], rotation
    q, k, half = dense_rows(q), dense_rows(k), rotary_dim // 2
    q_out, k_out = (torch.empty(tokens, n, dim, dtype=q.dtype, device=q.device) for n in (heads, key_heads))
    if not tokens:
        return q_out, k_out
    weights, eps = (q, k), 0.0
    if norms is not None:
        weights, eps = (norms.queries, norms.keys), norms.eps
    value, caches, slots = k, (k, k), positions
    if cache is not None:
        value, caches, slots = dense_rows(cache.new_values), (cache.keys, cache.values), cache.slots.contiguous()
    turns = _frequencies(theta, rotary_dim, scaling, q.device)
    _heads_kernel[tokens, -(-heads // _HEADS) + -(-key_heads // _HEADS)](
        *(q, k, value, q_out, k_out, *weights, positions.contiguous(), turns, *caches, slots, heads, key_heads),
        *(*q.stride()[:2], *k.stride()[:2], *value.stride()[:2], *caches[0].stride()[:2], *caches[1].stride()[:2]),
        *(eps, -1.0 if back else 1.0),
        NORM=norms is not None,
        STORE=cache is not None,
        VALUE=value.shape[2],
        BLOCK_OF_VALUE=triton.next_power_of_2(value.shape[2]),
        GROUPS=triton.next_power_of_2(-(-dim // GROUP.value)),
        HALF=half,
        REST=dim - rotary_dim,
        PAIRS=pairs,
        BLOCK=triton.next_power_of_2(half),
        HEADS=_HEADS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return q_out, k_out


@functools.lru_cache(maxsize=8)
def _frequencies(theta: float, dim: int, scaling: Scaling | None, device: torch.device) -> Tensor:
    """Return `frequencies` on the kernel's device."""
    return frequencies(theta, dim, scaling).to(device)


@triton.jit(do_not_specialize=["heads", "key_heads"])
def _heads_kernel(
    q_ptr, k_ptr, value_ptr, q_out_ptr, k_out_ptr, q_weight_ptr, k_weight_ptr, positions_ptr, frequencies_ptr,
    k_cache_ptr, v_cache_ptr, slots_ptr, heads, key_heads, q_token, q_head, k_token, k_head, v_token, v_head,
    k_slot, k_slot_head, v_slot, v_slot_head, eps, direction,
    NORM: tl.constexpr, STORE: tl.constexpr, VALUE: tl.constexpr, BLOCK_OF_VALUE: tl.constexpr, GROUPS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token, block, lane = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, HEADS)
    cos, sin = _turn(positions_ptr + token, frequencies_ptr, direction, HALF, BLOCK)
    of_queries = tl.cdiv(heads, HEADS)
    if block < of_queries:
        head = (block * HEADS + lane)[:, None]
        at = q_ptr + token * q_token + head * q_head
        to = q_out_ptr + (token * heads + head) * (2 * HALF + REST)
        _norm_and_rotate(
            at, to, to, head < heads, q_weight_ptr, eps, cos, sin, NORM, False, GROUPS, HALF, REST, PAIRS, BLOCK, HEADS
        )
    else:
        head = ((block - of_queries) * HEADS + lane)[:, None]
        at = k_ptr + token * k_token + head * k_head
        to, slot = k_out_ptr + (token * key_heads + head) * (2 * HALF + REST), token
        if STORE:
            slot = tl.load(slots_ptr + token).to(tl.int64)
            column = tl.arange(0, BLOCK_OF_VALUE)[None, :]
            inside = (head < key_heads) & (column < VALUE)
            value = tl.load(value_ptr + token * v_token + head * v_head + column, mask=inside)
            tl.store(v_cache_ptr + slot * v_slot + head * v_slot_head + column, value, mask=inside)
        kept = k_cache_ptr + slot * k_slot + head * k_slot_head
        _norm_and_rotate(
            at, to, kept, head < key_heads, k_weight_ptr, eps, cos, sin,
            NORM, STORE, GROUPS, HALF, REST, PAIRS, BLOCK, HEADS,
        )  # fmt: skip


@triton.jit
def _turn(position_ptr, frequencies_ptr, direction, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Cosine and sine of each pair's angle, FP32 [1, BLOCK]."""
    half = tl.arange(0, BLOCK)
    angle = tl.load(position_ptr).to(tl.float64) * tl.load(frequencies_ptr + half, mask=half < HALF, other=0.0)
    angle = (angle - tl.floor(angle / _TURN) * _TURN).to(tl.float32)
    return tl.cos(angle)[None, :], (tl.sin(angle) * direction)[None, :]


@triton.jit
def _norm_and_rotate(
    at, to, kept, exists, weight_ptr, eps, cos, sin, NORM: tl.constexpr, STORE: tl.constexpr, GROUPS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Run `_rotate_heads`, on normed heads if NORM. A head's squares are added in the order of `rms_norm`."""
    inverse_rms = cos
    if NORM:
        DIM: tl.constexpr = 2 * HALF + REST
        column = tl.arange(0, GROUPS)[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
        x = tl.load(at[:, :, None] + column, mask=exists[:, :, None] & (column < DIM), other=0.0)
        inverse_rms = inverse_rms_of(x, DIM, eps, HEADS, GROUPS)[:, None]
    _rotate_heads(at, to, kept, exists, cos, sin, inverse_rms, weight_ptr, NORM, STORE, HALF, REST, PAIRS, BLOCK)


@triton.jit
def _rotate_heads(
    at, to, kept, exists, cos, sin, inverse_rms, weight_ptr, NORM: tl.constexpr, STORE: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate the heads [HEADS, 1] at `at` and store them at `to`, and with STORE at `kept` as well."""
    EACH: tl.constexpr = 2 if PAIRS else 1
    PARTNER: tl.constexpr = 1 if PAIRS else HALF
    half = tl.arange(0, BLOCK)[None, :]
    inside, column = exists & (half < HALF), EACH * half
    first = _channels(at, column, inside, inverse_rms, weight_ptr, NORM).to(tl.float32)
    second = _channels(at, column + PARTNER, inside, inverse_rms, weight_ptr, NORM).to(tl.float32)
    turned = cast(first * cos - second * sin, to.dtype.element_ty)
    partner = cast(second * cos + first * sin, to.dtype.element_ty)
    tl.store(to + column, turned, mask=inside)
    tl.store(to + column + PARTNER, partner, mask=inside)
    if STORE:
        tl.store(kept + column, turned, mask=inside)
        tl.store(kept + column + PARTNER, partner, mask=inside)
    for passed in range(2 * HALF, 2 * HALF + REST, BLOCK):
        column = passed + half
        inside = exists & (column < 2 * HALF + REST)
        whole = _channels(at, column, inside, inverse_rms, weight_ptr, NORM)
        tl.store(to + column, whole, mask=inside)
        if STORE:
            tl.store(kept + column, whole, mask=inside)


@triton.jit
def _channels(at, column, inside, inverse_rms, weight_ptr, NORM: tl.constexpr):
    """Channels of heads as they are, or normed and rounded."""
    x = tl.load(at + column, mask=inside, other=0.0)
    if NORM:
        x = times_weight(x, inverse_rms, tl.load(weight_ptr + column, mask=inside, other=0.0))
    return x
