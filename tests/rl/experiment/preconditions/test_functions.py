"""Values of `kwargs` that our own rewards and environments cannot use are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from fp8rl.rl.experiment import parse_experiment
from fp8rl.rl.experiment.preconditions import check
from tests.support.preconditions import merged, refusal


@pytest.mark.parametrize(
    ("function", "kwargs", "expected"),
    [
        ("length", {"free": 0}, "free: found 0, expected a number greater than or equal to 1"),
        ("length", {"free": None}, "free: found None, expected a valid integer"),
        ("format", {"pattern": "("}, "pattern: found '(', expected a regular expression; this one has missing ), unt"),
        ("http", {"url": "localhost:80"}, "url: found 'localhost:80', expected text that matches ^https?://"),
        ("model", {"url": "http://a", "tokenizer": 3}, "tokenizer: found 3, expected a valid string"),
        ("model", {"url": "http://a", "tokenizer": "t", "label": -1}, "label: found -1, expected a number greater"),
    ],
)
def test_values_that_a_reward_of_ours_cannot_use(values: Any, function: str, kwargs: Any, expected: str) -> None:
    functions = [{"function": "integer"}, {"function": function, "kwargs": kwargs}]
    text = refusal(values, rewards={"functions": functions})
    assert text.startswith(f"rewards.functions.1.kwargs.{expected}")


@pytest.mark.parametrize(
    ("function", "kwargs", "expected"),
    [
        ("guess", {"tries": "many"}, "tries: found 'many', expected a valid integer"),
        ("python", {"timeout_s": "soon"}, "timeout_s: found 'soon', expected a valid number"),
    ],
)
def test_values_that_an_environment_of_ours_cannot_use(values: Any, function: str, kwargs: Any, expected: str) -> None:
    text = refusal(values, environment={"function": function, "kwargs": kwargs})
    assert text.startswith(f"environment.kwargs.{expected}")


def test_values_that_they_can_use(values: Any) -> None:
    rewards = [
        {"function": "integer"},
        {"function": "length", "kwargs": {"free": 40}},
        {"function": "format", "kwargs": {"pattern": ".*#### -?[0-9]+"}},
        {"function": "http", "kwargs": {"url": "https://service/judge"}},
    ]
    environment = {"function": "python", "kwargs": {"calls": 0, "timeout_s": 3, "role": "tool"}}
    check(parse_experiment(merged(values, rewards={"functions": rewards}, environment=environment)))
