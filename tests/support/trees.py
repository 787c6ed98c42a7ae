"""Rows that share prefixes: answers to one prompt, and conversations that branch."""

import random

import torch

from fp8rl.trainer.step.batch import TokenBatch
from tests.support.models import VOCAB


def branching_rows(rng: random.Random, spans: list[tuple[int, int]], branches: int = 3) -> list[list[int]]:
    """Rows of numbers of which none occurs twice but in a common prefix. spans: the fewest and most tokens of a
    stretch, by depth; some rows end where others go on."""
    rows: list[list[int]] = []
    used = 0

    def grow(row: list[int], depth: int) -> None:
        nonlocal used
        length = rng.randint(*spans[depth])
        row = [*row, *range(used, used + length)]
        used += length
        deeper = depth + 1 < len(spans)
        if not deeper or rng.random() < 0.3:
            rows.append(row)
        for _ in range(rng.randint(2, branches) if deeper else 0):
            grow(row, depth + 1)

    grow([], 0)
    rng.shuffle(rows)
    return rows


def batch_of_rows(rows: list[list[int]], targets: list[list[bool]], temperature: float = 0.9) -> TokenBatch:
    """A batch of rows of any numbers, with an advantage for each row."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for index, (row, asked) in enumerate(zip(rows, targets, strict=True)):
        tokens[index, : len(row)] = torch.tensor(row) * 7919 % VOCAB
        mask[index, : len(row)] = torch.tensor(asked)
    generator = torch.Generator().manual_seed(5)
    advantages = torch.randn(len(rows), 1, generator=generator).expand(tokens.shape).contiguous()
    return TokenBatch(tokens, lengths, mask, temperature, {"advantages": advantages})


def groups(prompt: int, answer: int, size: int = 4, count: int = 2, seed: int = 0) -> TokenBatch:
    """`count` prompts with `size` answers each, of which one is another's beginning and one its copy."""
    rng, rows, targets = random.Random(seed), [], []
    for group in range(count):
        start = [group * 1000 + at for at in range(prompt)]
        for _ in range(size):
            said = [10_000 + rng.randrange(1 << 16) for _ in range(rng.randint(answer // 2, answer))]
            rows.append(start + said)
            targets.append([False] * prompt + [True] * len(said))
    rows[1], targets[1] = rows[0][: prompt + 3], targets[0][: prompt + 3]
    rows[-1], targets[-1] = rows[-2], targets[-2]
    return batch_of_rows(rows, targets)


def conversations(seed: int = 1) -> TokenBatch:
    """A conversation whose turns branch: rows share sampled tokens, which count in each of them."""
    rows = branching_rows(random.Random(seed), [(30, 40), (4, 14), (4, 14), (4, 14)], 2)
    targets = [[at >= 30 and at % 5 != 0 for at in range(len(row))] for row in rows]
    return batch_of_rows(rows, targets)
