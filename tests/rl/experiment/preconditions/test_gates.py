"""Arguments of our own functions, and gates on what a spec names, are refused at the start."""

from __future__ import annotations

from typing import Any

import pytest

from fp8rl.rl.experiment import parse_experiment
from fp8rl.rl.experiment.preconditions import check
from fp8rl.rl.run.evaluation import HeldOut, set_metrics
from fp8rl.rl.run.feed.judging import JudgedAnswer
from fp8rl.rollout.tasks.rewards import RewardsSection
from fp8rl.rollout.types import Problem, SamplingParams, Trajectory
from tests.support.preconditions import merged, refusal

TWO = {"functions": [{"function": "integer"}, {"function": "length", "name": "short", "kwargs": {"free": 9}}]}
ONE = {"functions": [{"function": "integer"}]}


def gated(metric: str) -> list[dict[str, Any]]:
    return [{"metric": metric, "below": 0.5}]


@pytest.fixture
def sets(values: Any) -> dict[str, Any]:
    hard = {"name": "hard", "path": values["data"]["eval"], "samples": 2, "temperature": 1.0, "pass_at": [1]}
    return {"problems": 2, "sets": [hard]}


@pytest.mark.parametrize(
    ("metric", "sections", "expected"),
    [
        ("rollout/reward/nope", {"rewards": TWO}, "one of rollout/reward/integer, rollout/reward/short"),
        ("rollout/reward/length", {"rewards": TWO}, "one of rollout/reward/integer, rollout/reward/short"),
        ("rollout/reward/integer", {"rewards": ONE}, "another metric: this run has none of that kind"),
        ("eval/nope/accuracy", {}, "one of eval/accuracy, eval/problems"),
    ],
)
def test_a_metric_of_nothing_that_the_spec_names(values: Any, metric: str, sections: Any, expected: str) -> None:
    text = refusal({**values, "gates": gated(metric)}, **sections)
    assert text.startswith(f"gates.0.metric: found '{metric}', expected {expected}")


@pytest.mark.slow
def test_of_an_own_set_every_metric_may_have_a_gate_and_no_other(values: Any, sets: Any) -> None:
    trajectory = Trajectory([1], [2], [-0.5], True, [0], 0, 0)
    answer = JudgedAnswer(Problem("q", "1"), trajectory, [], 0.5, {"integer": 0.5})
    held = HeldOut("hard", (), SamplingParams(9, 1.0, ()), RewardsSection(), "", (1,))
    written = set_metrics(held, [[answer, answer]])
    assert len(written) == 7
    for metric in written:
        check(parse_experiment(merged({**values, "gates": gated(metric)}, eval=sets)))
    for metric in ("eval/hard/pass@2", "eval/hard/avg@3"):
        text = refusal({**values, "gates": gated(metric)}, eval=sets)
        assert f"found '{metric}', expected one of eval/accuracy, eval/problems, eval/graded, eval/hard/" in text


def test_a_metric_that_the_run_has(values: Any) -> None:
    judged = {"rewards": {"functions": [*TWO["functions"], {"function": "http", "kwargs": {"url": "http://a"}}]}}
    for metric in ("rollout/reward/short", "rollout/reward/http/style", "eval/accuracy", "eval/graded"):
        check(parse_experiment(merged({**values, "gates": gated(metric)}, **judged)))


@pytest.mark.parametrize(
    ("function", "kwargs", "expected"),
    [
        ("length", {"free": 0}, "free: found 0, expected a number greater than or equal to 1"),
        ("format", {"pattern": "("}, "pattern: found '(', expected a regular expression; this one has missing ), unt"),
        ("http", {"url": "localhost:80"}, "url: found 'localhost:80', expected text that matches ^https?://"),
        ("model", {"url": "http://a", "tokenizer": "t", "label": -1}, "label: found -1, expected a number greater"),
    ],
)
def test_values_that_a_reward_of_ours_cannot_use(values: Any, function: str, kwargs: Any, expected: str) -> None:
    functions = [{"function": "integer"}, {"function": function, "kwargs": kwargs}]
    text = refusal(values, rewards={"functions": functions})
    assert text.startswith(f"rewards.functions.1.kwargs.{expected}")
