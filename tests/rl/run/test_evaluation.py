"""When, on what and how a run is evaluated, over a stack that answers at once; real evaluations are in tests/e2e."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fp8rl.numerics.sampling import GREEDY, answer_seed
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.record.metrics import describe
from fp8rl.rl.run.evaluation import Evaluation, held_out, pass_at
from fp8rl.rl.run.feed.judging import Judge
from fp8rl.rl.run.interrupts import BoundedExitStack
from fp8rl.rollout.tasks.rewards import RewardsSection
from fp8rl.rollout.types import Group, SamplingParams, StaleWeightsError, Trajectory
from tests.support.experiments import experiment
from tests.support.paths import EXAMPLES
from tests.support.pools import Pool, sampling_of

TOKENIZER = AutoTokenizer.from_pretrained(EXAMPLES / "models/tiny_qwen3_moe")


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    lines = [json.dumps({"question": f"eval {n}", "answer": "#### 1"}) + "\n" for n in range(4)]
    (tmp_path / "eval").write_text("".join(lines))
    return {"train": "unread", "eval": str(tmp_path / "eval")}


class Engines(Pool):
    """Answers `#### 1` to the seeds of `right` and to all greedy ones, and `#### 2` to others, at version 3."""

    def __init__(self, right: set[int]) -> None:
        super().__init__(lambda group: [self._said(group, seed) for seed in group.seeds], at_once=True)
        self.right, self.closing, self.judge = right, BoundedExitStack(), Judge(RewardsSection(), TOKENIZER)

    def evaluation(self, settings: Experiment, version: int = 3) -> Evaluation:
        sampling = sampling_of(self, settings, TOKENIZER, self.judge)
        sampling.syncing.bridge.trainer.weight_version = version
        return Evaluation(settings, sampling, self.closing)

    def _said(self, group: Group, seed: int) -> Trajectory:
        text = "#### 1" if seed in {GREEDY, *self.right} else "#### 2"
        ids = [*TOKENIZER(text, add_special_tokens=False).input_ids, TOKENIZER.eos_token_id]
        return Trajectory(group.prompt.token_ids, ids, [-1.0] * len(ids), True, [3] * len(ids), 0, seed)


def seeds_of(settings: Experiment, name: str) -> list[tuple[int, ...]]:
    (found,) = [each for each in held_out(settings, TOKENIZER) if each.name == name]
    return [group.seeds for group in found.groups]


def test_held_out_problems_are_as_many_as_asked(data: dict[str, str]) -> None:
    (two,) = held_out(experiment(data=data, eval={"problems": 2}), TOKENIZER)
    assert [group.prompt.problem.question for group in two.groups] == ["eval 0", "eval 1"]
    assert TOKENIZER.decode(two.groups[1].prompt.token_ids) == "<|user|>eval 1<|assistant|>"
    assert all(group.seeds == (GREEDY,) for group in two.groups) and two.sampling.temperature == 0
    sets = [{"name": "three", "path": data["eval"], "problems": 3}, {"name": "some", "path": data["eval"]}]
    found = held_out(experiment(data=data, eval={"problems": 2, "sets": sets}), TOKENIZER)
    assert [(each.name, len(each.groups)) for each in found] == [("", 2), ("three", 3), ("some", 2)]
    found = held_out(experiment(data=data, eval={"problems": 9, "sets": sets}), TOKENIZER)
    assert [len(each.groups) for each in found] == [4, 3, 4]
    assert list(held_out(experiment(data=data, eval={"problems": 0, "sets": sets}), TOKENIZER)) == []


def test_seeds_are_of_run_set_problem_and_answer_and_never_those_of_training(data: dict[str, str]) -> None:
    def seeds(name: str, run: int = 0) -> list[int]:
        own = {"name": name, "path": data["eval"], "samples": 3, "temperature": 0.7}
        found = seeds_of(experiment(data=data, run={"seed": run}, eval={"sets": [own], "problems": 4}), name)
        return [seed for group in found for seed in group]

    assert seeds("a") == seeds("a") and len({*seeds("a"), *seeds("b"), *seeds("a", run=1)}) == 36
    assert all(2**62 <= seed < 2**63 for seed in seeds("a"))
    assert all(answer_seed(0, step, prompt, 0) < 2**62 for step in range(40) for prompt in range(40))


def test_each_set_has_its_own_sampling_rewards_and_metrics(data: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def short(answer):\n    return {'a': 0.5, 'b': 0.25 * len(answer)}\n")
    hard = {"name": "hard", "path": data["eval"], "samples": 4, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 7}
    own = {"name": "own", "path": data["eval"], "problems": 1, "rewards": [{"function": f"{tmp_path}/own.py:short"}]}
    settings = experiment(data=data, eval={"problems": 2, "sets": [{**hard, "pass_at": [1, 2, 4]}, own]})
    first, second = seeds_of(settings, "hard")
    engines = Engines(right={first[0], first[2], second[3]})
    engines.judge._teacher = pytest.fail  # type: ignore[assignment]  # it is not asked
    with engines.closing, BoundedExitStack() as closing:
        closing.callback(engines.judge.close)
        evaluation = engines.evaluation(settings)
        evaluation.begin(0)
        assert evaluation.under_way
        metrics, greedy = evaluation.finish()
        assert not evaluation.under_way
    assert [request.sampling.temperature for request in engines.asked] == [0.0] * 2 + [0.7] * 2 + [0.0]
    stop = (TOKENIZER.eos_token_id,)
    assert engines.asked[2].sampling == SamplingParams(7, 0.7, stop, top_p=0.9)
    assert engines.asked[0].sampling == SamplingParams(20, 0.0, stop) == engines.asked[4].sampling
    length = len(TOKENIZER("#### 1", add_special_tokens=False).input_ids) + 1
    ended = {"finished_fraction": 1.0, "response_tokens_mean": length}
    passed = {"accuracy": 3 / 8, "avg@4": 3 / 8, "pass@1": 3 / 8, "pass@2": (5 / 6 + 3 / 6) / 2, "pass@4": 1.0}
    of_hard = {"problems": 2.0, **ended, **passed}
    of_own = {"accuracy": 0.5 + 0.25 * 6, "problems": 1.0, "graded": 1.0, **ended}
    expected = {"eval/accuracy": 1.0, "eval/problems": 2.0, **{f"eval/hard/{name}": x for name, x in of_hard.items()}}
    assert metrics == pytest.approx(expected | {f"eval/own/{name}": x for name, x in of_own.items()})
    assert all(describe(name) for name in metrics)
    assert [answer.trajectory.group for answer in greedy] == [0, 1], "of the first greedy set"


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    for samples in range(1, 8):
        for right, k in product(range(samples + 1), range(1, samples + 1)):
            subsets = list(combinations([True] * right + [False] * (samples - right), k))
            assert pass_at(k, samples, right) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)
    assert pass_at(512, 1024, 1) == pytest.approx(0.5) and pass_at(1024, 1024, 1) == 1.0, "no overflow"


def test_it_is_due_at_intervals_and_at_the_end(data: dict[str, str]) -> None:
    def steps(every: int, problems: int = 4, **rollout: Any) -> tuple[list[int], list[int]]:
        settings = experiment(run={"steps": 7}, data=data, eval={"every": every, "problems": problems}, rollout=rollout)
        engines = Engines(right=set())
        engines.judge.close()
        evaluation = engines.evaluation(settings)
        due = [step for step in range(1, 8) if evaluation.is_due(step)]
        return due, [step for step in due if evaluation.runs_in_background(step)]

    assert steps(3) == ([3, 6, 7], []) and steps(0) == ([7], []) and steps(3, problems=0) == ([], [])
    assert steps(1, staleness=1) == ([1, 2, 3, 4, 5, 7], [1, 2, 3, 4, 5]), "a row holds one evaluation"
    assert steps(2, staleness=2) == ([2, 4, 7], [2, 4])


def test_a_row_says_which_step_its_evaluation_is_of_and_other_versions_are_none(data: dict[str, str]) -> None:
    engines = Engines(right=set())
    settings = experiment(data=data, eval={"problems": 2}, rollout={"staleness": 1})
    evaluation = engines.evaluation(settings)
    evaluation.begin(4)
    assert evaluation.finish()[0] == {"eval/accuracy": 1.0, "eval/problems": 2.0, "eval/at_step": 4.0}
    newer = engines.evaluation(settings, version=4)
    newer.begin(4)
    engines.judge.close()
    with pytest.raises(StaleWeightsError, match="at version 3, expected all at version 4"):
        newer.finish()
