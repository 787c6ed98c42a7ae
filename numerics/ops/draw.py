"""The draw of a token from its logits: a function of what is sampled, and of nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rl.numerics.backend.dispatch import op
from fp8rl.numerics.hashing import GOLDEN, mix, shifted
from fp8rl.numerics.sampling import GREEDY

_BLOCK = {"cpu": 1 << 18}
"""Logits at a time: more fall out of a CPU's caches."""
_ANY_BLOCK = 1 << 26
"""Elsewhere each pass over a block is a launch, and a block takes about 2 GiB while it is drawn from."""


@op
def draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One token of each row of logits [B, V], int64 [B]; a NaN is never drawn.

    By Gumbel's maximum: argmax(logits / temperature + noise) over the vocabulary is a draw from the softmax (Gumbel
    1954). It needs no sum, so there is no order of reduction to define. The quotient is in FP32, as in
    `token_logprobs`, noise and sum in FP64: in FP32 two tokens of a large vocabulary would often be equal. Ties go to
    the lower id. Tokens of logit -inf are drawn only where nothing else is left.

    Args:
        temperatures: float [B].
        seeds: int64 [B], one of each answer; `GREEDY` takes the most probable token.
        positions: int64 [B], of the last token that the row has seen, counted from 0 at the prompt's first.
    """
    rows = max(1, _BLOCK.get(logits.device.type, _ANY_BLOCK) // logits.shape[-1])
    pieces = (values.split(rows) for values in (logits, temperatures, seeds, positions))
    return torch.cat([_draw(*piece) for piece in zip(*pieces, strict=True)])


def gumbel(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """The noise of tokens 0 to count - 1, FP64 [B, count]; seeds and positions: int64 [B]."""
    row = mix(mix(seeds + GOLDEN) ^ mix(positions * GOLDEN + 1))
    column = torch.arange(1, count + 1, device=seeds.device) * GOLDEN
    bits = mix(row.unsqueeze(-1) + column)
    uniform = (shifted(bits, 12).double() + 0.5) * 2.0**-52  # never 0 nor 1
    return -(-uniform.log()).log()


def _draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    scaled = (logits.float() / temperatures.float().unsqueeze(-1)).double().nan_to_num(nan=-torch.inf)
    noisy = scaled + gumbel(seeds, positions, logits.shape[-1])
    return torch.where((seeds == GREEDY).unsqueeze(-1), scaled, noisy).argmax(-1)
