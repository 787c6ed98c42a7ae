"""Seeded draws in place of SGLang's: a token is a function of its answer's seed, its position and its logits."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.sampling import GREEDY


def seeds_of_batch(result: Any, cls: Any, batch: Any, vocab_size: int) -> Any:
    """`SamplingBatchInfo.from_schedule_batch`: the seeds of the batch's requests, which SGLang then carries along when
    batches are filtered and merged.

    By itself it fills them in under `--enable-deterministic-inference` alone, which no backend of a CPU allows, and
    gives all requests without a seed the same one. Here such a request gets one of its own, which it keeps when it is
    retracted.
    """
    seeds = []
    for parameters in (request.sampling_params for request in batch.reqs):
        if parameters.sampling_seed is None:
            parameters.sampling_seed = secrets.randbits(62)
        greedy = parameters.top_k == 1  # SGLang's form of temperature 0
        seeds.append(GREEDY if greedy else parameters.sampling_seed)
    result.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(result.device, non_blocking=True)
    return result


def draw_from_logits(logits: Tensor, sampling_info: Any, positions: Tensor) -> Tensor:
    """The tokens, int64 [B], of logits [B, V] in exact mode, which are narrowed; positions [B] are those of the last
    tokens seen."""
    return _drawn(logits, sampling_info.temperatures.reshape(-1), sampling_info.sampling_seed, positions)


def narrowed(logits: Tensor, sampling_info: Any) -> Tensor:
    """Logits [B, V] in exact mode without the tokens that top-k, top-p and min-p of their requests leave out: -inf
    there. Where none leaves any out, the logits themselves."""
    if not _narrows(sampling_info, logits.shape[-1]):
        return logits
    greedy = sampling_info.top_ks == 1  # whose log-probabilities are of the whole distribution
    top_p = sampling_info.top_ps.float().masked_fill(greedy, 1.0)
    top_k = sampling_info.top_ks.long().masked_fill(greedy, -1)
    min_p = sampling_info.min_ps.float().masked_fill(greedy, 0.0)
    floors = ops.support_floors(logits, sampling_info.temperatures.reshape(-1), top_p, top_k, min_p)
    return ops.narrowed(logits, floors)


def supports(logits: Tensor, wanted: list[bool]) -> list[list[int] | None]:
    """The tokens that each row of narrowed logits [B, V] is drawn from; None of rows that nobody asks about."""
    row, token = (~logits.isneginf()).nonzero(as_tuple=True)
    found = token.cpu().split(row.bincount(minlength=len(logits)).tolist())
    return [tokens.tolist() if asked else None for tokens, asked in zip(found, wanted, strict=True)]


def _narrows(sampling_info: Any, vocabulary: int) -> bool:
    """Whether a request of the batch leaves tokens out; greedy ones, of top-k 1, do not count."""
    top_k = sampling_info.top_ks
    some = sampling_info.need_top_k_sampling and bool(((top_k > 1) & (top_k < vocabulary)).any())
    return some or sampling_info.need_top_p_sampling or sampling_info.need_min_p_sampling


def draw_from_probabilities(
    original: Callable[..., Tensor],
    self: Any,
    probs: Tensor,
    sampling_info: Any,
    positions: Tensor,
    simple_sampling_case: bool,
) -> Tensor:
    """`Sampler._sample_from_probs` in native mode: tokens int32 [B] of probs [B, V], which have the temperature.

    Where a request wants top-p, top-k or min-p, the draw is SGLang's own and not seeded: with seeds it stops the
    scheduler, or draws from what these leave without normalising it. Answers that are known beforehand stay that.
    """
    seeds, ones = sampling_info.sampling_seed, torch.ones(len(probs), device=probs.device)
    logits = probs.log().clamp(min=torch.finfo(probs.dtype).min)  # so that the noise may choose any token
    if not _narrows(sampling_info, probs.shape[-1]):
        return _drawn(logits, ones, seeds, positions).to(torch.int32)
    unseeded = dataclasses.replace(sampling_info, sampling_seed=None)
    tokens = original(self, probs, unseeded, positions, simple_sampling_case)
    known = seeds < GREEDY
    if bool(known.any()):
        tokens = torch.where(known, _drawn(logits, ones, seeds, positions).to(torch.int32), tokens)
    return tokens


def _drawn(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """`ops.draw`, of answers that are known beforehand (`canary_seed`) at an infinite temperature."""
    return ops.draw(logits, temperatures.masked_fill(seeds < GREEDY, torch.inf), seeds, positions)
