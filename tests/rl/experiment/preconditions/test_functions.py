"""Values of `kwargs` that our own rewards cannot use are refused before anything starts."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest

from fp8rl.rl.experiment import parse_experiment
from fp8rl.rl.experiment.preconditions import check
from fp8rl.rollout.tasks.named_functions import named_object
from fp8rl.rollout.tasks.rewards.builtin import BUILT_IN
from tests.support.preconditions import merged, refusal


@pytest.mark.parametrize(
    ("function", "kwargs", "expected"),
    [
        ("length", {"free": 0}, "free: found 0, expected a number greater than or equal to 1"),
        ("length", {"free": "many"}, "free: found 'many', expected a valid integer"),
        ("length", {"free": None}, "free: found None, expected a valid integer"),
        ("format", {"pattern": "("}, "pattern: found '(', expected a regular expression; this one has missing ), unt"),
        ("format", {"pattern": 12}, "pattern: found 12, expected a valid string"),
        ("format", {"pattern": None}, "pattern: found None, expected a valid string"),
        ("http", {"url": 5}, "url: found 5, expected a valid string"),
        ("http", {"url": "localhost:80"}, "url: found 'localhost:80', expected text that matches ^https?://"),
        ("model", {"url": "http://a", "tokenizer": 3}, "tokenizer: found 3, expected a valid string"),
        ("model", {"url": "http://a", "tokenizer": "t", "label": -1}, "label: found -1, expected a number greater"),
    ],
)
def test_values_that_a_reward_of_ours_cannot_use(values: Any, function: str, kwargs: Any, expected: str) -> None:
    functions = [{"function": "integer"}, {"function": function, "kwargs": kwargs}]
    text = refusal(values, rewards={"functions": functions})
    assert text.startswith(f"rewards.functions.1.kwargs.{expected}")


def test_values_that_they_can_use(values: Any) -> None:
    rewards = [
        {"function": "integer"},
        {"function": "length", "kwargs": {"free": 40}},
        {"function": "format", "kwargs": {"pattern": ".*#### -?[0-9]+"}},
        {"function": "http", "kwargs": {"url": "https://service/judge"}},
    ]
    check(parse_experiment(merged(values, rewards={"functions": rewards})))


def test_every_parameter_of_ours_has_a_type() -> None:
    ours = [named_object(name, "", {name: each.function}) for name, each in BUILT_IN.items()]
    for function in ours:
        assert get_type_hints(function).keys() >= inspect.signature(function).parameters.keys() - {"self"}
