"""The draw of a token: `numerics.ops.draw` in one pass over the logits, with no noise in memory.

A program takes a block of one row's vocabulary to its best token; the blocks' best are compared by torch. A maximum has
no order of reduction, so the cut into blocks changes no token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8rl.numerics import hashing
from fp8rl.numerics.kernels.memory import dense_rows
from fp8rl.numerics.sampling import GREEDY

_BLOCK = 4096
_GOLDEN, _GREEDY = tl.constexpr(hashing.GOLDEN), tl.constexpr(GREEDY)
_MIX_0, _MIX_1 = (tl.constexpr(factor) for factor in hashing.MIX)
_LARGEST = tl.constexpr(torch.finfo(torch.float64).max)


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One token of each row of logits [B, V], int64 [B]: argmax(logits / temperature + noise of seed and position)."""
    logits = dense_rows(logits)
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, _BLOCK)
    best = torch.empty(rows, blocks, dtype=torch.float64, device=logits.device)
    token = torch.empty(rows, blocks, dtype=torch.int64, device=logits.device)
    if rows:
        _draw_kernel[rows, blocks](
            *(logits, temperatures.float().contiguous(), seeds.contiguous(), positions.contiguous(), best, token),
            *(vocabulary, logits.stride(0)),
            BLOCK=_BLOCK,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return token.gather(-1, best.argmax(-1, keepdim=True)).squeeze(-1)  # of equal blocks the first


@triton.jit
def _draw_kernel(
    logits_ptr, temperatures_ptr, seeds_ptr, positions_ptr, best_ptr, token_ptr,
    vocabulary, stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocabulary
    seed = tl.load(seeds_ptr + row + tl.arange(0, 1))
    position = tl.load(positions_ptr + row + tl.arange(0, 1))
    y = tl.load(logits_ptr + row * stride + index, mask=inside, other=float("nan")).to(tl.float32)
    y = tl.div_rn(y, tl.zeros((BLOCK,), tl.float32) + tl.load(temperatures_ptr + row)).to(tl.float64)
    key = _mix(_mix(seed + _GOLDEN) ^ _mix(position * _GOLDEN + 1))
    bits = _mix(key + (index + 1).to(tl.int64) * _GOLDEN)
    uniform = (_shifted(bits, 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    noise = tl.where(seed == _GREEDY, 0.0, -tl.log(-tl.log(uniform)))
    # A NaN, and what lies behind the vocabulary's end, is below everything, also below a logit of -inf.
    y = tl.where(y == y, tl.minimum(tl.maximum(y, -_LARGEST), _LARGEST) + noise, float("-inf"))
    # Where all is -inf the first token is taken.
    where = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + where, tl.max(y, 0))
    tl.store(token_ptr + where, tl.program_id(1) * BLOCK + tl.argmax(y, 0).to(tl.int64))


@triton.jit
def _mix(x):
    """`numerics.hashing.mix`; products wrap around."""
    x = (x ^ _shifted(x, 30)) * _MIX_0
    x = (x ^ _shifted(x, 27)) * _MIX_1
    return x ^ _shifted(x, 31)


@triton.jit
def _shifted(x, BITS: tl.constexpr):
    """int64 x >> BITS with zeros shifted in."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)
