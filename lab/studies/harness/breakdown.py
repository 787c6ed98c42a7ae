"""Breaks abs d down: by a token's position in its answer, by its probability, and by the length of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from scipy import stats
from torch import Tensor

from fp8rl.trainer.step.batch import TokenBatch

POSITIONS = (1, 2, 5, 9, 17, 33)
LENGTHS = (1, 9, 17, 25, 33)
PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.01)
"""Bounds of the bins; a bin has its lower bound and not its upper one."""
EDGES: dict[str, Sequence[float]] = {"position": POSITIONS, "length": LENGTHS, "probability": PROBABILITIES}
AXES = {"position": "position, tokens", "length": "length of the answer, tokens", "probability": "probability"}
"""What the axes of figures say."""


@dataclass(frozen=True)
class AnswerTokens:
    """The sampled tokens of some answers, one answer after the other."""

    abs_d: Tensor
    """fp64 [N], nats."""
    by: dict[str, Tensor]
    """fp64 [N] each: `position` in the answer, from 1; `length` of the answer; `probability` under the rollout."""

    @classmethod
    def of(cls, batch: TokenBatch, abs_d: Tensor) -> AnswerTokens:
        """Take the tokens of a batch with the field `rollout_logprobs`. abs_d: fp64 [B, S]."""
        mask = batch.loss_mask
        by = {
            "position": mask.cumsum(1)[mask].double(),
            "length": mask.sum(1, keepdim=True).expand_as(mask)[mask].double(),
            "probability": batch.fields["rollout_logprobs"][mask].double().exp(),
        }
        return cls(abs_d[mask].double(), by)


def rank_correlations(tokens: AnswerTokens) -> dict[str, float]:
    """Spearman's rank correlation of abs d with each; 0 where all tokens have the same, as answers of one length."""
    return {f"rank correlation/{name}": _spearman(tokens.abs_d, values) for name, values in tokens.by.items()}


def _spearman(first: Tensor, second: Tensor) -> float:
    if first.unique().numel() == 1 or second.unique().numel() == 1:
        return 0.0
    return float(stats.spearmanr(first.numpy(), second.numpy()).statistic)


def bins(answers: Sequence[AnswerTokens]) -> dict[str, list[tuple[str, float, int]]]:
    """The mean abs d of all tokens in each bin: by what they are binned, (bin, mean, tokens); 0 in one without any."""
    abs_d = torch.cat([tokens.abs_d for tokens in answers])
    found: dict[str, list[tuple[str, float, int]]] = {}
    for name, edges in EDGES.items():
        values = torch.cat([tokens.by[name] for tokens in answers])
        for low, high in pairwise(edges):
            mine = abs_d[(values >= low) & (values < high)]
            mean = float(mine.mean()) if mine.numel() else 0.0
            found.setdefault(name, []).append((_label(name, low, high), mean, mine.numel()))
    return found


def _label(name: str, low: float, high: float) -> str:
    if name == "probability":
        return f"{low:g} to {min(high, 1):g}"
    return f"{low:g}" if high == low + 1 else f"{low:g} to {high - 1:g}"
