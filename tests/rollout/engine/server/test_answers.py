"""Answers of a server, parsed: tokens, log-probabilities, versions and routes."""

from __future__ import annotations

import base64
import math
import struct
from dataclasses import replace
from typing import Any

import pytest

from fp8rl.rollout.engine.server import answers
from fp8rl.rollout.types import EngineError, SamplingParams
from tests.support.definitions import SIZES


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


def answer(**meta: Any) -> dict[str, Any]:
    logprobs, stopped = [[-0.25, 5, None], [-1.5, 7, None]], {"type": "stop", "matched": 7}
    about = {"id": "r", "finish_reason": stopped, "output_token_logprobs": logprobs}
    return {"output_ids": [5, 7], "meta_info": {**about, "weight_versions": [span("2", 0, 2)], **meta}}


def test_versions_expand_to_one_per_token_or_are_refused() -> None:
    spans = [span("1", 0, 2), span("4", 2, 3), span("5", 3, 6)]
    assert answers.expand_versions(spans, 6) == [1, 1, 4, 5, 5, 5]
    assert answers.expand_versions([span("1", 0, 0)], 0) == answers.expand_versions([], 0) == []
    for wrong in ((), [("0", 0, 2)], [("0", 1, 3)], [("0", 0, 1), ("1", 2, 3)], [("0", 0, 4)]):
        with pytest.raises(EngineError, match="cover the 3 generated tokens"):
            answers.expand_versions([span(*each) for each in wrong], 3)
    with pytest.raises(EngineError, match="'default'"):
        answers.expand_versions([span("default", 0, 3)], 3)


def test_an_answer_is_parsed() -> None:
    """A logprob that JSON cannot carry is NaN: orjson writes null, and the loop drops and counts such tokens."""
    found = answers.parse_completion(answer())
    assert (found.token_ids, found.logprobs, found.weight_versions) == ([5, 7], [-0.25, -1.5], [2, 2])
    assert found.finished and not found.aborted and found.routed_experts is None
    assert not answers.parse_completion(answer(finish_reason={"type": "length", "length": 2})).finished
    first, second = answers.parse_completion(answer(output_token_logprobs=[[None, 5, None], [-1.5, 7, None]])).logprobs
    assert math.isnan(first) and second == -1.5


def test_an_answer_that_the_engine_gives_up_is_an_error_and_one_that_a_pause_cuts_is_not() -> None:
    abort = {"type": "abort", "message": "too long", "status_code": 400}
    with pytest.raises(EngineError, match="aborted: too long"):
        answers.parse_completion(answer(finish_reason=abort))
    cut = answers.parse_completion(answer(finish_reason={**abort, "status_code": None}))
    assert cut.aborted and not cut.finished and cut.token_ids == [5, 7]
    for logprobs in ([[-0.25, 5, None]], [[-1.5, 7, None], [-0.25, 5, None]]):  # of other tokens
        with pytest.raises(EngineError, match="logprobs"):
            answers.parse_completion(answer(output_token_logprobs=logprobs))


def test_the_likeliest_tokens_come_with_their_logprobs_or_are_missed() -> None:
    asked = SamplingParams(max_new_tokens=2, likeliest=2)
    likely = [[[-0.25, 5, None], [-2.0, 9, None]], [[-0.5, 1, None], [-1.5, 7, None]]]
    found = answers.parse_completion(answer(output_top_logprobs=likely), sampling=asked).supports
    assert found is not None and found.logprobs is not None
    assert (found.lists(), found.logprobs.tolist()) == ([[5, 9], [1, 7]], [-0.25, -2.0, -0.5, -1.5])
    first = found.first(1)
    assert first.then(found).logprobs is not None and len(first.then(found).lists()) == 3
    lists = (likely[:1], [[*likely[0], likely[0][0]], likely[1]])
    for wrong in ({}, *({"output_top_logprobs": each} for each in lists)):
        with pytest.raises(EngineError, match="expected one of up to 2 for each of the 2 generated tokens"):
            answers.parse_completion(answer(**wrong), sampling=asked)


# Routes.

SHAPE = replace(SIZES, layers=2, top_k=3)


def meta(*experts: int) -> dict[str, Any]:
    """SGLang's form: little-endian int32 in base64."""
    return {"id": "r", "routed_experts": base64.b64encode(struct.pack(f"<{len(experts)}i", *experts)).decode()}


def test_routes_are_read_by_token_layer_and_expert() -> None:
    """Dense layers and the last token have none."""
    routes = answers.parse_routes(meta(*range(12)), tokens=3, sizes=SHAPE)
    assert routes.tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]] and str(routes.dtype) == "torch.int16"
    assert answers.parse_routes(meta(), tokens=1, sizes=SHAPE).shape == (0, 2, 3)
    later = answers.parse_routes(meta(*range(12)), tokens=3, sizes=replace(SHAPE, dense_layers=1))
    assert later.tolist() == [[[3, 4, 5]], [[9, 10, 11]]]
    found = answer(prompt_tokens=2, **meta(*range(18)))  # two prompt tokens and two generated ones: routes of three
    both = answers.parse_completion(found, SHAPE).routed_experts
    assert both is not None and both.flatten().tolist() == list(range(18)) and both.shape == (3, 2, 3)
    found["meta_info"]["prompt_tokens"] = 3
    with pytest.raises(EngineError, match="found 18 routed experts, expected 24"):
        answers.parse_completion(found, SHAPE)


@pytest.mark.parametrize("count", [0, 6, 11, 18])
def test_routes_of_another_number_of_tokens_are_an_error(count: int) -> None:
    with pytest.raises(EngineError, match=f"request r: found {count} routed experts, expected 12, for 2 tokens in 2"):
        answers.parse_routes(meta(*range(count)), tokens=3, sizes=SHAPE)
    with pytest.raises(EngineError, match="found no routed experts, expected the experts of 2 tokens"):
        answers.parse_routes({"id": "r"}, tokens=3, sizes=SHAPE)


# Log-probabilities of given tokens.


def scored(*logprobs: float | None, reason: dict[str, Any] | None = None) -> dict[str, Any]:
    """SGLang writes null for the first token, which nothing precedes."""
    reported = [[value, 5, None] for value in (None, *logprobs)]
    finish = reason or {"type": "length", "length": 1}
    return {"meta_info": {"id": "r", "finish_reason": finish, "input_token_logprobs": reported}}


def test_every_token_but_the_first_has_a_logprob() -> None:
    assert answers.parse_prompt_logprobs(scored(-0.5, -2.0), 3) == [-0.5, -2.0]
    first, second = answers.parse_prompt_logprobs(scored(None, -2.0), 3)
    assert math.isnan(first) and second == -2.0
    assert answers.parse_prompt_logprobs(scored(), 1) == []
    with pytest.raises(EngineError, match="found logprobs for 2 prompt tokens, expected one for each of the 3 tokens"):
        answers.parse_prompt_logprobs(scored(-0.5), 3)
    with pytest.raises(EngineError, match="aborted: too long"):
        answers.parse_prompt_logprobs(scored(-0.5, reason={"type": "abort", "message": "too long"}), 2)
