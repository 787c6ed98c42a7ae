"""Computes the gated delta rule and its gates (`numerics.ops.gated_delta`). The torch definitions compute gradients.

A program has some values of a head's state in registers, and goes through a sequence token by token. Sums over keys are
added in the order of a layout of Triton's. The order is the same for all callers, because they launch one compiled
kernel: tensors are contiguous, and no number is specialized.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import cast
from fp8rl.numerics.ops.gated_delta import LENGTH_EPS

_VALUES = 8  # of a program: with 32 heads of 128, one sequence has a warp for each of the schedulers of an H100
_LENGTHS = tl.constexpr(256)  # added up at a time
_ELEMENTS = 1024


def delta_gates_forward(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    if g.numel():
        _gates_kernel[(-(-g.numel() // _ELEMENTS),)](
            *(a.contiguous(), b.contiguous(), a_log, dt_bias, g, beta, g.numel(), a.shape[-1]),
            BLOCK=_ELEMENTS,
            enable_fp_fusion=False,
        )
    return g, beta


def paged_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cache: Tensor,
    slots: Tensor,
    lengths: Tensor,
    begun: Tensor,
) -> Tensor:
    """Compute `numerics.ops.paged_gated_delta_rule`. Raises ValueError if a state of the cache is not contiguous."""
    heads, keys, values = v.shape[1], k.shape[2], v.shape[2]
    if cache.stride()[1:] != (keys * values, values, 1):
        raise ValueError(f"found states with strides {cache.stride()}, expected each state contiguous [heads, K, V]")
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if out.numel():
        _rule_kernel[(len(lengths), heads, -(-values // _VALUES))](
            *(x.contiguous() for x in (q, k, v, g, beta)),
            *(out, cache, slots, lengths, begun, cache.stride(0), heads, heads // k.shape[1], keys**-0.5),
            KEYS=keys,
            VALUES=values,
            DECAYS=g[0].numel() // heads,
            EPS=LENGTH_EPS,
            KEY_BLOCK=triton.next_power_of_2(keys),
            VALUE_BLOCK=_VALUES,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["slot_stride", "heads", "shares", "scale"])
def _rule_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr, cache_ptr, slots_ptr, lengths_ptr, begun_ptr,
    slot_stride, heads, shares, scale,
    KEYS: tl.constexpr, VALUES: tl.constexpr, DECAYS: tl.constexpr, EPS: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    first = tl.full((), 0, tl.int64)
    for start in range(0, sequence, _LENGTHS):
        index = start + tl.arange(0, _LENGTHS)
        first += tl.sum(tl.load(lengths_ptr + index, mask=index < sequence, other=0).to(tl.int64), 0)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    key, value = tl.arange(0, KEY_BLOCK), tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    inside = (key < KEYS)[:, None] & (value < VALUES)[None, :]
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    place = cache_ptr + slot * slot_stride + (head * KEYS + key)[:, None] * VALUES + value[None, :]
    state = tl.load(place, mask=inside & (tl.load(begun_ptr + sequence) != 0), other=0.0)
    for step in range(length):
        token = first + step
        of_key, of_value = (token * (heads // shares) + head // shares) * KEYS + key, token * heads + head
        q = tl.load(q_ptr + of_key, mask=key < KEYS, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + of_key, mask=key < KEYS, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + of_value * VALUES + value, mask=value < VALUES, other=0.0)
        q = q * tl.rsqrt(tl.sum(q * q, 0) + EPS) * scale
        k = k * tl.rsqrt(tl.sum(k * k, 0) + EPS)
        if DECAYS == 1:
            state = state * tl.exp(tl.load(g_ptr + of_value))
        else:
            state = state * tl.exp(tl.load(g_ptr + of_value * KEYS + key, mask=key < KEYS, other=0.0))[:, None]
        update = (v.to(tl.float32) - tl.sum(state * k[:, None], 0)) * tl.load(beta_ptr + of_value)
        state = state + k[:, None] * update[None, :]
        out = tl.sum(state * q[:, None], 0)
        tl.store(out_ptr + of_value * VALUES + value, cast(out, v.dtype), mask=value < VALUES)
    tl.store(place, state, mask=inside)


@triton.jit(do_not_specialize=["count", "heads"])
def _gates_kernel(a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, count, heads, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, head = index < count, index % heads
    x = tl.load(a_ptr + index, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_bias_ptr + head, mask=inside, other=0.0).to(tl.float32)
    # log1p(e) by the logarithm of what 1 + e is rounded to, corrected by the rounding
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small
    log1p = tl.where(rounded == 1.0, small, tl.log(rounded) * (small / tl.where(rounded == 1.0, 1.0, rounded - 1.0)))
    decay = tl.exp(tl.load(a_log_ptr + head, mask=inside, other=0.0).to(tl.float32))
    tl.store(g_ptr + index, -decay * (tl.maximum(x, 0.0) + log1p), mask=inside)
    b = tl.load(b_ptr + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(beta_ptr + index, 1.0 / (1.0 + tl.exp(-b)), mask=inside)
