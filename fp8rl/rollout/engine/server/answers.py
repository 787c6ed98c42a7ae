"""Parses an engine's answers: tokens, log-probabilities, weight versions, and the experts of each token."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fp8rl.models.sizes import ModelSizes
from fp8rl.rollout.types import Completion, EngineError, KeptTokens, SamplingParams, StaleWeightsError, Trajectory

_PLAIN = SamplingParams(max_new_tokens=1)


def parse_completion(
    answer: dict[str, Any], routes: ModelSizes | None = None, sampling: SamplingParams = _PLAIN
) -> Completion:
    """Parse an answer of /generate to a request with `return_logprob`, and with `return_routed_experts` for `routes`.

    sampling: the parameters. With `supports`, log-probabilities are relative to the tokens that truncation kept.

    Raises EngineError if the engine gave up, or if its tokens, log-probabilities, version spans, routes and supports do
    not fit together.
    """
    meta: dict[str, Any] = answer["meta_info"]
    reason = meta["finish_reason"]
    aborted = reason["type"] == "abort" and reason.get("status_code") is None  # by a pause; a fault has a status
    if not aborted:
        _check_not_aborted(meta)
    token_ids, reported = answer["output_ids"], meta["output_token_logprobs"]
    if token_ids != [token for _, token, _ in reported]:
        raise EngineError(
            f"request {meta['id']}: found logprobs for {len(reported)} tokens, expected one for each of the "
            f"{len(token_ids)} generated tokens, in their order"
        )
    drawn_from = _likeliest(meta, len(token_ids), sampling.likeliest) if sampling.likeliest else None
    if sampling.supports:
        drawn_from = _supports(meta, token_ids)
        reported = [(logprob, 0, None) for logprob in meta.get("output_token_sampling_logprobs", [])]
    return Completion(
        token_ids=token_ids,
        supports=drawn_from,
        logprobs=_logprobs(reported),
        weight_versions=expand_versions(meta.get("weight_versions", []), len(token_ids)),
        finished=reason["type"] == "stop",
        aborted=aborted,
        routed_experts=None if routes is None else parse_routes(meta, meta["prompt_tokens"] + len(token_ids), routes),
    )


def _supports(meta: dict[str, Any], token_ids: list[int]) -> KeptTokens:
    masks = meta.get("output_token_sampling_mask", [])
    said = len(masks) == len(token_ids) == len(meta.get("output_token_sampling_logprobs", []))
    if not said or any(mask is None or token not in mask for mask, token in zip(masks, token_ids)):
        raise EngineError(
            f"request {meta['id']}: found {len(masks)} sets of tokens to draw from, expected one set for each of the "
            f"{len(token_ids)} generated tokens, which contains the token"
        )
    return KeptTokens.of(masks)


def _likeliest(meta: dict[str, Any], tokens: int, count: int) -> KeptTokens:
    found = meta.get("output_top_logprobs", [])
    if len(found) != tokens or any(not each or len(each) > count for each in found):
        raise EngineError(
            f"request {meta['id']}: found lists of likeliest tokens for {len(found)} tokens, expected one of up to "
            f"{count} for each of the {tokens} generated tokens"
        )
    logprobs = _logprobs([entry for each in found for entry in each])
    return KeptTokens.of([[token for _, token, _ in each] for each in found], logprobs)


def parse_prompt_logprobs(answer: dict[str, Any], length: int) -> list[float]:
    """Parse the log-probabilities of a prompt's tokens, except the first. The request had `logprob_start_len` 0.

    length: number of tokens of the prompt. Raises EngineError: the request was aborted, or the answer has another
    number of log-probabilities.
    """
    meta: dict[str, Any] = answer["meta_info"]
    _check_not_aborted(meta)
    reported = meta["input_token_logprobs"]
    if len(reported) != length:  # the ids say nothing: SGLang 0.5.19 replaces the vocabulary's last one by 0
        raise EngineError(
            f"request {meta['id']}: found logprobs for {len(reported)} prompt tokens, expected one for each of the "
            f"{length} tokens"
        )
    return _logprobs(reported[1:])


def expand_versions(spans: list[dict[str, Any]], length: int) -> list[int]:
    """Return the weight version of each of `length` tokens from SGLang's spans [{version, start, end}], end exclusive.

    Raises EngineError if the spans do not cover each token exactly once, or if a version is no number.
    """
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions) or span["end"] < span["start"]:
            break
        if not str(span["version"]).isdecimal():
            raise EngineError(f"found weight version {span['version']!r}, expected a number of optimizer steps")
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != length:
        raise EngineError(f"found weight version spans {spans}, expected them to cover the {length} generated tokens")
    return versions


def check_versions(trajectories: Iterable[Trajectory], oldest: int, newest: int) -> None:
    """Raise StaleWeightsError, with counts, if a token has a weight version below `oldest` or above `newest`."""
    found = Counter(version for trajectory in trajectories for version in trajectory.weight_versions)
    wrong = sum(count for version, count in found.items() if not oldest <= version <= newest)
    if wrong:
        counts = ", ".join(f"{count} at version {version}" for version, count in sorted(found.items()))
        expected = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
        raise StaleWeightsError(
            f"{wrong} of {found.total()} tokens were sampled with other weights than expected: found {counts}, "
            f"expected all at {expected}. Sync the weights before sampling."
        )


def _check_not_aborted(meta: dict[str, Any]) -> None:
    reason = meta["finish_reason"]
    if reason["type"] == "abort":
        raise EngineError(f"a request was aborted: {reason.get('message', 'no reason given')}")


def _logprobs(reported: list[tuple[float | None, int, str | None]]) -> list[float]:
    # JSON has no NaN and no infinity: the server writes null for both.
    return [math.nan if logprob is None else logprob for logprob, _, _ in reported]


def parse_routes(meta: dict[str, Any], tokens: int, sizes: ModelSizes) -> Tensor:
    """Parse the routes in an answer's `meta_info`: int16 [tokens - 1, MoE layers, top_k].

    tokens: number of tokens of prompt and answer. The last token was never an input of the model, so it has no route.
    Raises EngineError: the answer has no routes, or another number of routes than its tokens need.
    """
    text = meta.get("routed_experts")
    if text is None:
        raise EngineError(f"request {meta['id']}: found no routed experts, expected the experts of {tokens - 1} tokens")
    data = bytearray(base64.b64decode(text))
    expected = (tokens - 1) * sizes.layers * sizes.top_k
    if len(data) != expected * torch.int32.itemsize:
        raise EngineError(
            f"request {meta['id']}: found {len(data) / torch.int32.itemsize:g} routed experts, expected {expected}, "
            f"for {tokens - 1} tokens in {sizes.layers} layers with {sizes.top_k} each"
        )
    routes = torch.frombuffer(data, dtype=torch.int32) if data else torch.empty(0, dtype=torch.int32)
    return routes.to(torch.int16).view(tokens - 1, sizes.layers, sizes.top_k)[:, sizes.dense_layers :]
