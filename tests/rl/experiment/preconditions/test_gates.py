"""Gates on what a spec names: refused at the start where the spec names no such thing."""

from __future__ import annotations

from typing import Any

import pytest

from fp8rl.rl.experiment import parse_experiment
from fp8rl.rl.experiment.preconditions import check
from fp8rl.rl.run.evaluation import HeldOut, set_metrics
from fp8rl.rl.run.feed.judging import JudgedAnswer
from fp8rl.rollout.tasks.rewards.functions import RewardsSection
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
        (
            "rollout/outcome/nope",
            {"environment": {"function": "calculator"}},
            "one of rollout/outcome/calls, rollout/o",
        ),
    ],
)
def test_a_metric_of_nothing_that_the_spec_names(values: Any, metric: str, sections: Any, expected: str) -> None:
    text = refusal({**values, "gates": gated(metric)}, **sections)
    assert text.startswith(f"gates.0.metric: found '{metric}', expected {expected}")


@pytest.mark.slow
def test_of_an_own_set_every_metric_may_have_a_gate_and_no_other(values: Any, sets: Any) -> None:
    trajectory = Trajectory([1], [2], [-0.5], True, [0], 0, 0)
    answer = JudgedAnswer(Problem("q", "1"), trajectory, [], 1.0, {"integer": 1.0})
    held = HeldOut("hard", (), SamplingParams(9, 1.0, ()), RewardsSection(), "", (1,))
    written = set_metrics(held, [[answer, answer]])
    assert len(written) == 6
    for metric in written:
        check(parse_experiment(merged({**values, "gates": gated(metric)}, eval=sets)))
    for metric in ("eval/hard/pass@2", "eval/hard/avg@3"):
        text = refusal({**values, "gates": gated(metric)}, eval=sets)
        assert f"found '{metric}', expected one of eval/accuracy, eval/problems, eval/hard/accuracy" in text


@pytest.mark.parametrize(
    ("metric", "sections"),
    [
        ("rollout/reward/short", {"rewards": TWO}),
        (
            "rollout/reward/http/style",
            {"rewards": {"functions": [{"function": "http", "kwargs": {"url": "http://a"}}]}},
        ),
        ("rollout/outcome/unread", {"environment": {"function": "calculator"}}),
        ("eval/accuracy", {}),
    ],
)
def test_a_metric_that_the_run_has(values: Any, metric: str, sections: Any) -> None:
    check(parse_experiment(merged({**values, "gates": gated(metric)}, **sections)))
