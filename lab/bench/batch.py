"""A batch of random tokens to train on."""

from __future__ import annotations

import torch

from fp8rl.trainer.step.batch import TokenBatch


def random_batch(rows: int, width: int, vocab: int, seed: int = 0) -> TokenBatch:
    """`rows` full rows of `width` tokens, of which all but the first count."""
    tokens = torch.randint(6, vocab, (rows, width), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(rows, width, dtype=torch.bool)
    mask[:, 0] = False
    return TokenBatch(tokens, torch.full((rows,), width), mask)
