"""The noise floor: how far log-probabilities differ where nothing is wrong.

Two kinds. One engine against itself, when the same tokens are computed in another way: prefilled instead of decoded, or
alone instead of in a batch. And trainer against engine, both in BF16, so without any quantization.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fp8rl.diagnose.calibration import sampled_batch
from fp8rl.diagnose.difference import Difference, difference
from fp8rl.rl.run.stack import Stack
from fp8rl.rollout.server.client import EngineClient
from fp8rl.rollout.types import Prompt
from fp8rl.trainer.step.batch import TokenBatch

ALONE = 8
"""Sequences that are scored one by one."""
RESERVED = 6
"""SGLang 0.5.19 takes prompts that are this many tokens short of its context length."""


def against_trainer(stack: Stack, batch: TokenBatch) -> Difference:
    """Trainer against engine on the tokens that the engine sampled."""
    return difference(stack.trainer.score(batch), batch.fields["rollout_logprobs"], batch.loss_mask)


def prefill_against_decode(stack: Stack, batch: TokenBatch) -> Difference:
    """The engine's log-probabilities of its own tokens, prefilled with their prompts, against those it sampled by.

    batch: sampled at temperature 1, the only one at which SGLang scores given tokens.
    """
    if batch.temperature != 1.0:
        raise ValueError(f"temperature: found {batch.temperature}, expected 1.0; a prefill knows no other")
    scored, known = _scored(stack, batch)
    return difference(scored, batch.fields["rollout_logprobs"], batch.loss_mask & known)


def alone_against_together(stack: Stack, batch: TokenBatch) -> Difference:
    """Every token of the longest rows, prefilled one row after the other against all rows at once."""
    rows = batch.lengths.argsort(descending=True, stable=True)[:ALONE].tolist()
    longest = batch.select(rows)
    together, known = _scored(stack, longest)
    alone = [_scored(stack, longest.select([row]))[0][0] for row in reversed(range(len(rows)))]
    padded = torch.zeros_like(together)
    for row, values in enumerate(reversed(alone)):
        padded[row, : len(values)] = values
    return difference(padded, together, known)


def bf16_on_both_sides(stack: Stack, prompts: list[Prompt], answers: int) -> Difference:
    """Trainer against engine, both switched to BF16, on a sample of that engine. `stack` stays so."""
    stack.switch(replace(stack.numerics, trainer="bf16", rollout="bf16"))
    stack.syncing.sync()
    return against_trainer(stack, sampled_batch(stack, prompts, answers, stack.experiment.rollout.temperature))


def _scored(stack: Stack, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Prefilled log-probabilities [B, S] and which of them there are: none at index 0, nor behind the longest prompt
    that the engine takes."""
    longest = stack.experiment.rollout.context_length - RESERVED
    sequences = [row[: min(int(n), longest)].tolist() for row, n in zip(batch.tokens, batch.lengths, strict=True)]
    return _padded(stack.engines.ask(lambda client: _score(client, sequences)), batch.width)


async def _score(client: EngineClient, sequences: Sequence[list[int]]) -> list[list[float]]:
    return await client.score(list(sequences))


def _padded(rows: Sequence[list[float]], width: int) -> tuple[Tensor, Tensor]:
    values, known = torch.zeros(len(rows), width), torch.zeros(len(rows), width, dtype=torch.bool)
    for row, logprobs in enumerate(rows):
        values[row, 1 : 1 + len(logprobs)] = torch.tensor(logprobs)
        known[row, 1 : 1 + len(logprobs)] = True
    return values, known
