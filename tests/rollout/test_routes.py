"""What an engine reports of its routing, parsed without a server."""

from __future__ import annotations

import base64
import struct
from dataclasses import replace
from typing import Any

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rollout.errors import EngineError
from fp8rl.rollout.routes import RouteShape, parse_routes, route_shape
from fp8rl.rollout.server.client import parse_completion
from tests.support.definitions import SIZES

SHAPE = RouteShape(layers=2, top_k=3)


def meta(*experts: int) -> dict[str, Any]:
    """SGLang's form: little-endian int32 in base64."""
    return {"id": "r", "routed_experts": base64.b64encode(struct.pack(f"<{len(experts)}i", *experts)).decode()}


def test_routes_are_read_by_token_layer_and_expert() -> None:
    routes = parse_routes(meta(*range(12)), tokens=3, shape=SHAPE)
    assert routes.tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert str(routes.dtype) == "torch.int16"


def test_one_token_has_no_route() -> None:
    assert parse_routes(meta(), tokens=1, shape=SHAPE).shape == (0, 2, 3)


@pytest.mark.parametrize("count", [0, 6, 11, 18])
def test_routes_of_another_number_of_tokens_are_an_error(count: int) -> None:
    with pytest.raises(EngineError, match=f"request r: found {count} routed experts, expected 12, for 2 tokens in 2"):
        parse_routes(meta(*range(count)), tokens=3, shape=SHAPE)


def test_dense_layers_have_no_routes() -> None:
    routes = parse_routes(meta(*range(12)), tokens=3, shape=RouteShape(layers=2, top_k=3, dense=1))
    assert routes.tolist() == [[[3, 4, 5]], [[9, 10, 11]]]


def test_missing_routes_are_an_error() -> None:
    with pytest.raises(EngineError, match="found no routed experts, expected those of 2 tokens"):
        parse_routes({"id": "r"}, tokens=3, shape=SHAPE)


def test_an_answer_carries_the_routes_of_prompt_and_generation() -> None:
    """A prompt of two tokens and two generated ones: routes of three."""
    answer = {
        "output_ids": [5, 7],
        "meta_info": {
            "prompt_tokens": 2,
            "finish_reason": {"type": "length", "length": 2},
            "output_token_logprobs": [[-0.25, 5, None], [-1.5, 7, None]],
            "weight_versions": [{"version": "2", "start": 0, "end": 2}],
            **meta(*range(18)),
        },
    }
    assert parse_completion(answer).routed_experts is None
    routes = parse_completion(answer, SHAPE).routed_experts
    assert routes is not None and routes.flatten().tolist() == list(range(18)) and routes.shape == (3, 2, 3)
    answer["meta_info"]["prompt_tokens"] = 3
    with pytest.raises(EngineError, match="found 18 routed experts, expected 24"):
        parse_completion(answer, SHAPE)


def test_the_shape_is_that_of_the_model() -> None:
    assert route_shape(SIZES) == RouteShape(4, 2)
    assert route_shape(replace(SIZES, dense_layers=1)) == RouteShape(4, 2, dense=1)
    with pytest.raises(UserError, match="numerics.router_replay"):
        route_shape(replace(SIZES, experts=0))
