"""Log-probabilities by the trainer's op, in SGLang's sampler and its scorer of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from numerics import ops
from rollout.plugin.sampling import draw_from_logits


def of_samples(
    original: Callable[..., torch.Tensor],
    self: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[list[int] | None],
    positions: torch.Tensor,
) -> torch.Tensor:
    """`Sampler.forward`: draws a token of each row of logits [B, V], and writes log-probabilities to `logits_output`.

    The most probable tokens, if they are asked for, are reported as SGLang computes them: on a copy, as it divides and
    normalises in place, and without seeds, for which it has a kernel of its own that no CPU runs.
    """
    logits = logits_output.next_token_logits
    if return_logprob and any(top_logprobs_nums):
        logits_output.next_token_logits = logits.clone()
        unseeded = dataclasses.replace(sampling_info, sampling_seed=None)
        original(self, logits_output, unseeded, True, top_logprobs_nums, token_ids_logprobs, positions)
        logits_output.next_token_logits = logits
    tokens = draw_from_logits(logits, sampling_info, positions)
    if not return_logprob:
        return tokens.to(torch.int32)
    temperatures = sampling_info.temperatures.reshape(-1)
    logits_output.next_token_logprobs = ops.token_logprobs(logits, tokens, temperatures)[0]
    if any(token_ids_logprobs):
        wanted = [ids or [] for ids in token_ids_logprobs]
        rows = torch.tensor([row for row, ids in enumerate(wanted) for _ in ids], device=logits.device)
        others = torch.tensor([token for ids in wanted for token in ids], device=logits.device)
        found = ops.token_logprobs(logits[rows], others, temperatures[rows])[0]
        logits_output.next_token_token_ids_logprobs_val = list(found.split([len(ids) for ids in wanted]))
        logits_output.next_token_token_ids_logprobs_idx = wanted
    return tokens.to(torch.int32)


def of_prompts(
    original: Callable[..., Any],
    self: Any,
    pruned_states: torch.Tensor,
    sample_indices: torch.Tensor,
    input_logprob_indices: torch.Tensor,
    token_to_seq_idx: list[int],
    lm_head: Any,
    get_logits_fn: Callable[..., torch.Tensor],
    logits_metadata: Any,
    skip_chunking_for_dp_attn: bool = False,
) -> Any:
    """`InputLogprobProcessor.forward`: log-probabilities of given tokens, at temperature 1, from logits [rows, V].

    input_logprob_indices, ascending, are the rows that predict a token of `extend_input_logprob_token_ids_gpu`.
    """
    found: list[torch.Tensor] = []
    seen = 0

    def get_logits(states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal seen
        logits = get_logits_fn(states, *args, **kwargs)
        here = (input_logprob_indices >= seen) & (input_logprob_indices < seen + len(states))
        tokens = logits_metadata.extend_input_logprob_token_ids_gpu[here].long()
        found.append(ops.token_logprobs(logits[input_logprob_indices[here] - seen], tokens, 1.0)[0])
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
    return result, sampled_logits
