"""Log-probabilities of given tokens: the answer of the server, parsed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fp8rl.rollout.errors import EngineError
from fp8rl.rollout.server.client import parse_prompt_logprobs


def answer(*logprobs: float | None, reason: dict[str, Any] | None = None) -> dict[str, Any]:
    """SGLang writes null for the first token, which nothing precedes."""
    reported = [[value, 5, None] for value in (None, *logprobs)]
    finish = reason or {"type": "length", "length": 1}
    return {"meta_info": {"id": "r", "finish_reason": finish, "input_token_logprobs": reported}}


def test_every_token_but_the_first_has_a_logprob() -> None:
    assert parse_prompt_logprobs(answer(-0.5, -2.0), 3) == [-0.5, -2.0]
    assert parse_prompt_logprobs(answer(), 1) == []


def test_a_logprob_that_json_cannot_carry_is_nan() -> None:
    first, second = parse_prompt_logprobs(answer(None, -2.0), 3)
    assert math.isnan(first) and second == -2.0


def test_another_number_of_logprobs_is_an_error() -> None:
    with pytest.raises(EngineError, match="found logprobs for 2 prompt tokens, expected one for each of the 3 tokens"):
        parse_prompt_logprobs(answer(-0.5), 3)


def test_an_aborted_request_is_an_error() -> None:
    with pytest.raises(EngineError, match="aborted: too long"):
        parse_prompt_logprobs(answer(-0.5, reason={"type": "abort", "message": "too long"}), 2)
