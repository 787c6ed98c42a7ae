"""Turns trajectories and supervised examples into the trainer's padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8rl.numerics.sampling import EVERY_TOKEN, GREEDY, Truncation
from fp8rl.trainer.step.batch import LIKELY_IDS, LIKELY_LOGPROBS, UNKNOWN, TokenBatch
from fp8rl.trainer.step.kept_tokens import KeptTokenPool

if TYPE_CHECKING:
    from fp8rl.rollout.types import Trajectory


@dataclass(frozen=True)
class SftExample:
    """A supervised example: `prompt_ids` are the context, `target_ids` (with EOS) are learnt."""

    prompt_ids: list[int]
    target_ids: list[int]


def batch_from_trajectories(
    trajectories: Sequence[Trajectory],
    temperature: float,
    *,
    replay: bool = False,
    redraws: int = 0,
    truncation: Truncation = EVERY_TOKEN,
) -> TokenBatch:
    """Make a batch with a row per trajectory: prompt, then answer. Targets are the tokens that the model sampled. The
    batch has the engine's routes if it reported them.

    The field `rollout_logprobs` is the engine's logprob of each target as received (NaN and inf included), 0 elsewhere.
    If the engine reported its likeliest tokens, there are `LIKELY_IDS` and `LIKELY_LOGPROBS`, too.

    Args:
        trajectories: a trajectory without sampled tokens gives a row without targets.
        temperature: the temperature that the tokens were sampled with.
        replay: whether the trainer is to take the engine's routes.
        redraws: number of rows, spread over the batch, whose tokens the trainer is to draw again.
        truncation: the limits that the tokens were drawn under; the batch has supports if the engine reported any.

    Raises:
        ValueError: numbers of logprobs, routes or supports do not fit the tokens, or a prompt is empty.
    """
    for row, trajectory in enumerate(trajectories):
        told = sum(end - begin for begin, end in trajectory.environment_spans)
        if len(trajectory.logprobs) != len(trajectory.token_ids) - told:
            raise ValueError(
                f"trajectory {row}: found {len(trajectory.logprobs)} logprobs, "
                f"expected {len(trajectory.token_ids) - told}, one per sampled token"
            )
    batch = TokenBatch.of([t.prompt_ids for t in trajectories], [t.token_ids for t in trajectories], temperature)
    for row, trajectory in enumerate(trajectories):
        for begin, end in trajectory.environment_spans:  # nothing is learnt from an environment's words
            batch.loss_mask[row, len(trajectory.prompt_ids) + begin : len(trajectory.prompt_ids) + end] = False
    rollout_logprobs = torch.zeros(batch.tokens.shape)
    # Row-major, so the mask lists each row's sampled tokens in order, row after row.
    rollout_logprobs[batch.loss_mask] = torch.tensor([x for t in trajectories for x in t.logprobs], dtype=torch.float32)
    seeds, count = torch.full((batch.rows,), GREEDY), min(redraws, batch.rows)
    for row in (index * batch.rows // count for index in range(count)):
        seeds[row] = trajectories[row].seed
    return replace(
        batch,
        fields={"rollout_logprobs": rollout_logprobs, **_likeliest(trajectories, batch)},
        routes=_routes(trajectories, batch),
        replay=replay,
        seeds=seeds if redraws else None,
        truncation=truncation,
        supports=_supports(trajectories, batch),
    )


def batch_from_examples(examples: Sequence[SftExample]) -> TokenBatch:
    """Make a batch with a row per example: prompt, then target, whose tokens are the loss's targets; temperature 1.
    Raises ValueError: there is no example, or an example has an empty prompt or target."""
    for row, example in enumerate(examples):
        if not example.target_ids:
            raise ValueError(f"example {row}: found no target token, expected at least one (the EOS)")
    return TokenBatch.of([e.prompt_ids for e in examples], [e.target_ids for e in examples])


def _routes(trajectories: Sequence[Trajectory], batch: TokenBatch) -> Tensor | None:
    """int16 [B, S, L, K], -1 for last tokens and padding; None if no trajectory has routes."""
    reported = [t.routed_experts for t in trajectories if t.routed_experts is not None]
    if not reported:
        return None
    routes = torch.full((*batch.tokens.shape, *reported[0].shape[1:]), UNKNOWN, dtype=torch.int16)
    for row, (trajectory, length) in enumerate(zip(trajectories, batch.lengths.tolist())):
        experts = trajectory.routed_experts
        if experts is None or len(experts) != length - 1:
            found = "no routes" if experts is None else f"routes of {len(experts)} tokens"
            raise ValueError(f"trajectory {row}: found {found}, expected routes of {length - 1} tokens")
        routes[row, : length - 1] = experts
    return routes


def _supports(trajectories: Sequence[Trajectory], batch: TokenBatch) -> KeptTokenPool | None:
    """Return the tokens that each sampled token was drawn from, for rows that have them; None if no trajectory has."""
    reported = [t.supports for t in trajectories if t.supports is not None]
    if not reported or reported[0].logprobs is not None:
        return None
    for row, t in enumerate(trajectories):
        if t.supports is not None and len(t.supports.counts) != len(t.logprobs):
            found, expected = len(t.supports.counts), len(t.logprobs)
            raise ValueError(f"trajectory {row}: found {found} supports, expected {expected}, one per sampled token")
    has = torch.tensor([t.supports is not None for t in trajectories])
    counts, ids = torch.cat([each.counts for each in reported]), torch.cat([each.ids for each in reported])
    return KeptTokenPool.of(batch.loss_mask & has[:, None], counts, ids)


def _likeliest(trajectories: Sequence[Trajectory], batch: TokenBatch) -> dict[str, Tensor]:
    """Return the fields of the likeliest tokens, if reported: float32 [B, S, k], 0 where nothing was sampled."""
    reported = [t.supports for t in trajectories if t.supports is not None and t.supports.logprobs is not None]
    if not reported:
        return {}
    counts, targets = torch.cat([each.counts for each in reported]), int(batch.loss_mask.sum())
    if len(counts) != targets or bool((counts != counts[0]).any()):
        raise ValueError(f"likeliest: found lists for {len(counts)} tokens, expected {targets} lists of equal length")
    ids, logprobs = (torch.zeros(*batch.tokens.shape, int(counts[0])) for _ in range(2))
    ids[batch.loss_mask] = torch.cat([each.ids for each in reported]).float().view(targets, -1)
    logprobs[batch.loss_mask] = torch.cat([each.logprobs for each in reported if each.logprobs is not None]).view(
        targets, -1
    )
    return {LIKELY_IDS: ids, LIKELY_LOGPROBS: logprobs}
