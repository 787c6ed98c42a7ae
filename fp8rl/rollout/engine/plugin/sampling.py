"""Replaces SGLang's draws by seeded draws, and its log-probabilities by the op that the trainer uses.

A token depends only on the seed of its answer, its position and its logits.
"""

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
    """After `SamplingBatchInfo.from_schedule_batch`: set the seeds of the batch's requests. SGLang keeps them when it
    filters and merges batches.

    SGLang itself sets seeds only with `--enable-deterministic-inference`, which no CPU backend allows. It also gives
    all requests without a seed the same seed. Here a request without a seed gets a random seed, and keeps this seed if
    it is retracted.
    """
    seeds = []
    for parameters in (request.sampling_params for request in batch.reqs):
        if parameters.sampling_seed is None:
            parameters.sampling_seed = secrets.randbits(62)
        greedy = parameters.top_k == 1  # SGLang's form of temperature 0
        seeds.append(GREEDY if greedy else parameters.sampling_seed)
    result.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(result.device, non_blocking=True)
    return result


def narrowed(logits: Tensor, sampling_info: Any) -> Tensor:
    """Return the logits [B, V] with -inf for tokens that the request's top-k, top-p or min-p leave out, in exact mode.
    If no request leaves tokens out, return `logits` itself."""
    if not _narrows(sampling_info, logits.shape[-1]):
        return logits
    greedy = sampling_info.top_ks == 1  # whose log-probabilities are of the whole distribution
    top_p = sampling_info.top_ps.float().masked_fill(greedy, 1.0)
    top_k = sampling_info.top_ks.long().masked_fill(greedy, -1)
    min_p = sampling_info.min_ps.float().masked_fill(greedy, 0.0)
    floors = ops.truncation_floors(logits, sampling_info.temperatures.reshape(-1), top_p, top_k, min_p)
    return ops.narrowed(logits, floors)


def supports(logits: Tensor, wanted: list[bool]) -> list[list[int] | None]:
    """Return for each row of narrowed logits [B, V] the ids that can be drawn. None if the row is not `wanted`."""
    row, token = (~logits.isneginf()).nonzero(as_tuple=True)
    found = token.cpu().split(row.bincount(minlength=len(logits)).tolist())
    return [tokens.tolist() if asked else None for tokens, asked in zip(found, wanted, strict=True)]


def _narrows(sampling_info: Any, vocabulary: int) -> bool:
    """Return whether a request of the batch leaves tokens out. Greedy requests (top-k 1) do not count."""
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
    """Around `Sampler._sample_from_probs` in native mode: draw tokens int32 [B] from probs [B, V].

    If a request of the batch has top-p, top-k or min-p, SGLang itself draws, without seeds. With seeds it would stop
    the scheduler, or draw from the remaining tokens without normalising their probabilities. Answers that are known
    beforehand (`canary_seed`) are always drawn with their seeds.
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
    """Call `ops.draw`, with an infinite temperature for answers that are known beforehand (`canary_seed`)."""
    return ops.draw(logits, temperatures.masked_fill(seeds < GREEDY, torch.inf), seeds, positions)


# Log-probabilities by the trainer's op, in SGLang's sampler and its scorer of prompts.

NEVER = -9999.0
"""The log-probability of a token that cannot be drawn. JSON has no infinity, and OpenAI writes this number."""


def of_samples(
    original: Callable[..., Tensor],
    self: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[list[int] | None],
    positions: Tensor,
) -> Tensor:
    """Around `Sampler.forward`: draw a token for each row of logits [B, V], and compute log-probabilities.

    These are of the distribution of the draw, without the tokens that top-p, top-k and min-p leave out.
    """
    logits = narrowed(logits_output.next_token_logits, sampling_info)
    temperatures = sampling_info.temperatures.reshape(-1)
    tokens = _drawn(logits, temperatures, sampling_info.sampling_seed, positions)
    if not return_logprob:
        return tokens.to(torch.int32)
    logits_output.next_token_logprobs = ops.token_logprobs(logits, tokens, temperatures)[0]
    if any(wanted := sampling_info.return_sampling_masks or []):
        logits_output.next_token_sampling_mask_idx = supports(logits, wanted)
        logits_output.next_token_sampling_logprobs = logits_output.next_token_logprobs.tolist()
    if any(top_logprobs_nums):
        values, ids = _most_probable(logits, temperatures, max(top_logprobs_nums))
        values = values.clamp(min=NEVER)
        logits_output.next_token_top_logprobs_val = [row[:k] for row, k in zip(values, top_logprobs_nums)]
        logits_output.next_token_top_logprobs_idx = [row[:k] for row, k in zip(ids, top_logprobs_nums)]
    if any(token_ids_logprobs):
        wanted = [ids or [] for ids in token_ids_logprobs]
        rows = torch.tensor([row for row, ids in enumerate(wanted) for _ in ids], device=logits.device)
        others = torch.tensor([token for ids in wanted for token in ids], device=logits.device)
        found = ops.token_logprobs(logits[rows], others, temperatures[rows])[0].clamp(min=NEVER)
        logits_output.next_token_token_ids_logprobs_val = list(found.split([len(ids) for ids in wanted]))
        logits_output.next_token_token_ids_logprobs_idx = wanted
    return tokens.to(torch.int32)


def of_prompts(
    original: Callable[..., Any],
    self: Any,
    pruned_states: Tensor,
    sample_indices: Tensor,
    input_logprob_indices: Tensor,
    token_to_seq_idx: list[int],
    lm_head: Any,
    get_logits_fn: Callable[..., Tensor],
    logits_metadata: Any,
    skip_chunking_for_dp_attn: bool = False,
) -> Any:
    """Around `InputLogprobProcessor.forward`: return log-probabilities of given tokens, at temperature 1.

    input_logprob_indices: the rows that predict the tokens in `extend_input_logprob_token_ids_gpu`, ascending.
    """
    found: list[Tensor] = []
    likely: list[tuple[list[Any], list[Any]]] = []  # of each row, log-probabilities and ids
    most = max(logits_metadata.top_logprobs_nums) if logits_metadata.extend_return_top_logprob else 0
    seen = 0

    def get_logits(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal seen
        logits = get_logits_fn(states, *args, **kwargs)
        here = (input_logprob_indices >= seen) & (input_logprob_indices < seen + len(states))
        tokens = logits_metadata.extend_input_logprob_token_ids_gpu[here].long()
        rows = logits[input_logprob_indices[here] - seen]
        found.append(ops.token_logprobs(rows, tokens, 1.0)[0])
        if most:
            values, ids = _most_probable(rows, 1.0, most)
            likely.extend(zip(values.tolist(), ids.tolist()))
        seen += len(states)
        return logits

    result, sampled_logits = original(
        self,
        pruned_states,
        sample_indices,
        input_logprob_indices,
        token_to_seq_idx,
        lm_head,
        get_logits,
        logits_metadata,
        skip_chunking_for_dp_attn,
    )
    result.token_logprobs = torch.cat(found)
    if most:
        left = iter(likely)
        of_requests = [
            [[values[:k] for values in next(left)] for _ in range(rows)]
            for k, rows in zip(logits_metadata.top_logprobs_nums, logits_metadata.extend_logprob_pruned_lens_cpu)
        ]
        result.top_logprobs_val = [[values for values, _ in rows] for rows in of_requests]
        result.top_logprobs_idx = [[ids for _, ids in rows] for rows in of_requests]
    return result, sampled_logits


def _most_probable(logits: Tensor, temperatures: float | Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ids [B, count] of the `count` most probable tokens of each row of logits [B, V].

    The op runs once for each of the `count`. So a token has the same bits as if it were drawn or given.
    """
    ids = logits.topk(min(count, logits.shape[-1]), dim=-1).indices
    return torch.stack([ops.token_logprobs(logits, column, temperatures)[0] for column in ids.unbind(-1)], -1), ids
