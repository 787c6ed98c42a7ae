"""Draws tokens. A token is a function of its logits, temperature, seed and position, and of nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.backend.dispatch import op
from fp8rl.numerics.sampling import GOLDEN, GREEDY, mix, shifted

# The tokens that top-p, top-k and min-p leave to be drawn: a function of a row's logits and settings alone.

ONE = 40
"""The most probable token has the weight 2^ONE. Other weights are cut to whole numbers. The sum of the weights of 2^22
tokens fits into an int64, so that it is exact in any order."""
EXP2 = tuple(math.log(2.0) ** n / math.factorial(n) for n in range(12))
"""Taylor coefficients of 2^f. For |f| <= 1/2 the remainder is below 2^-46."""
LOG2_E, LEAST = 1.0 / math.log(2.0), -62.0
"""A token that is less than 2^LEAST times as probable as the most probable token has the weight 0."""


@op
def truncation_floors(logits: Tensor, temperatures: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Return the floor of each row, FP32 [B]: a token may be drawn if and only if its logit is not below the floor.

    Logits are compared in FP32. Equal logits stay or go together, so the order of ids does not matter, and more than
    top-k tokens may stay. A token's weight is exp((logit - largest) / temperature), in whole multiples of 2^-40. Two
    FP32 divisions and a polynomial in FP64 give it the same bits on every machine (`weights`). Sums of whole numbers
    have the same bits in any order. Each setting looks at the whole distribution, and a token stays if all three keep
    it:

    - top-p: all larger logits together weigh less than top-p of the whole (both as FP64);
    - top-k: fewer than top-k logits are larger;
    - min-p: the token weighs at least min-p of the largest weight.

    The largest logit always stays. A NaN counts as -inf. Where nothing is cut the floor is the row's lowest logit.

    Args:
        logits: [B, V] of any float dtype. temperatures: float [B].
        top_p: FP32 [B]; 1 and above is off. top_k: int64 [B]; below 1, or V and above, is off.
        min_p: FP32 [B]; 0 and below is off.
    """
    return torch.cat([_floors(*piece) for piece in _pieces(logits, temperatures, top_p, top_k, min_p)])


def _pieces(logits: Tensor, *of_rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield some rows of logits [B, V] and of tensors [B, ...] at a time.

    On a CPU more logits would not fit into its caches. Elsewhere each pass over a piece is a launch, and a piece takes
    about a GiB of memory.
    """
    rows = max(1, (1 << 18 if logits.device.type == "cpu" else 1 << 25) // logits.shape[-1])
    return zip(*(values.split(rows) for values in (logits, *of_rows)), strict=True)


def narrowed(logits: Tensor, floors: Tensor) -> Tensor:
    """Return logits [..., V] with -inf in place of logits below their row's floor [...]; with gradient."""
    return logits.masked_fill(logits < floors.unsqueeze(-1), -torch.inf)


def weights(logits: Tensor, largest: Tensor, temperatures: Tensor) -> Tensor:
    """Return each token's weight, int64 [B, V], of FP32 logits [B, V], none NaN; largest, temperatures: FP32 [B, 1]."""
    scaled, top = (logits / temperatures).double(), (largest / temperatures).double()
    exponent = torch.where(logits == largest, 0.0, (scaled - top) * LOG2_E).clamp_(min=LEAST)
    whole = (exponent + 0.5).floor()
    part = exponent - whole
    power = torch.full_like(part, EXP2[-1])
    for coefficient in reversed(EXP2[:-1]):
        power = power * part + coefficient
    return (power * 2.0**ONE).long() >> -whole.long()


def _floors(logits: Tensor, temperatures: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    vocabulary = logits.shape[-1]
    values = logits.float().masked_fill(logits.isnan(), -torch.inf).sort(dim=-1, descending=True).values
    weight = weights(values, values[:, :1], temperatures.float().unsqueeze(-1))
    before = weight.cumsum(-1) - weight  # of the first of equal logits, what all larger ones weigh
    bound = top_p.double() * weight.sum(-1).double()
    by_p = torch.where(top_p >= 1, vocabulary, (before.double() < bound.unsqueeze(-1)).sum(-1))
    by_k = torch.where((top_k < 1) | (top_k > vocabulary), vocabulary, top_k)
    least = (min_p.double() * 2.0**ONE).unsqueeze(-1)
    by_m = (weight.double() >= least).long().cummin(-1).values.sum(-1)
    count = torch.minimum(torch.minimum(by_p, by_k), by_m).clamp(min=1)
    return values.gather(-1, count.unsqueeze(-1) - 1).squeeze(-1)


# Log-probabilities of given tokens.


@op
def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return log_softmax(logits / temperature) at `tokens`, and the entropy of that distribution in nats.

    logits [..., V] of any float dtype, tokens int64 [...], temperature a number or a tensor [...], one for each row.
    Everything in FP32: one division, then log_softmax over the whole vocabulary in one reduction. A token of logit -inf
    adds 0 to the entropy and to its gradient. Returns FP32 [...] twice, both with gradient. If the caller does not use
    the entropy's gradient, it costs no memory and changes no bit.
    """
    divisor = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).unsqueeze(-1)
    logps = (logits.float() / divisor).log_softmax(-1)
    return logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), _Entropy.apply(logps)


class _Entropy(torch.autograd.Function):
    """-Σ p log p over the last axis, of log p [..., V]. It keeps only log p, which the softmax keeps anyway."""

    @staticmethod
    def forward(ctx: Any, logps: Tensor) -> Tensor:
        ctx.save_for_backward(logps)
        return -(logps.exp() * logps.masked_fill(logps == -torch.inf, 0.0)).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (logps,) = ctx.saved_tensors
        return -logps.exp() * (logps.masked_fill(logps == -torch.inf, 0.0) + 1.0) * grads[0].unsqueeze(-1)


@op
def draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token of each row of logits [B, V], int64 [B]; a NaN is never drawn.

    With Gumbel noise, argmax(logits / temperature + noise) over the vocabulary is a draw from the softmax (Gumbel
    1954). It needs no sum, so there is no order of reduction to define. The quotient is in FP32, as in
    `token_logprobs`. Noise and sum are in FP64, because in FP32 two tokens of a large vocabulary would often be equal.
    Ties go to the lower id. A token of logit -inf is drawn only if no other token is left.

    Args:
        temperatures: float [B].
        seeds: int64 [B], each the seed of an answer; `GREEDY` takes the most probable token.
        positions: int64 [B], the position of each row's last token so far, counted from 0 at the prompt's first.
    """
    drawn = []
    for some, temperature, seed, position in _pieces(logits, temperatures, seeds, positions):
        scaled = (some.float() / temperature.float().unsqueeze(-1)).double().nan_to_num(nan=-torch.inf)
        noisy = scaled + gumbel(seed, position, some.shape[-1])
        drawn.append(torch.where((seed == GREEDY).unsqueeze(-1), scaled, noisy).argmax(-1))
    return torch.cat(drawn)


def gumbel(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """Return the noise of tokens 0 to count - 1, FP64 [B, count]; seeds and positions: int64 [B]."""
    row = mix(mix(seeds + GOLDEN) ^ mix(positions * GOLDEN + 1))
    column = torch.arange(1, count + 1, device=seeds.device) * GOLDEN
    bits = mix(row.unsqueeze(-1) + column)
    uniform = (shifted(bits, 12).double() + 0.5) * 2.0**-52  # never 0 nor 1
    return -(-uniform.log()).log()
