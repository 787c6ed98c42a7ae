"""What a feed admits and gives, over a stack whose answers come when the test says so."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch

import fp8rl.rl.run.feed.sampling as sampling_module
from fp8rl.rl.loop import rollout_records
from fp8rl.rl.record.metrics_log import StepClock
from fp8rl.rl.run.batching import RolloutBatch
from fp8rl.rl.run.events import FilterError
from fp8rl.rl.run.feed.feed import Feed
from fp8rl.rl.run.feed.judging import Judge
from fp8rl.rl.run.feed.sampling import Sampling, done
from fp8rl.rl.run.feed.state import FeedState, SavedGroup, read_answered
from fp8rl.rollout.tasks.rewards import RewardsSection
from fp8rl.rollout.types import EngineError, Group, KeptTokens, Problem, Prompt, StaleWeightsError, Trajectory
from tests.support.experiments import experiment
from tests.support.pools import Pool, sampling_of

PROMPTS, SIZE = 3, 2


class Letters:
    """A tokenizer whose every character is a token; a first token 5 is a wrong answer."""

    eos_token_id = 0
    added_tokens_decoder: ClassVar[dict[int, str]] = {}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return messages[-1]["content"]

    def __call__(self, text: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])

    def decode(self, ids: list[int], **_: Any) -> str:
        return "#### 0" if ids[:1] == [5] else "#### 1"


@functools.cache
def judge() -> Judge:
    return Judge(RewardsSection(), cast(Any, Letters()))


class Engines(Pool):
    """Answers at the trainer's version of then.

    solved: the first answer to each of these questions is right and all others are wrong; None: all are right. failed:
    answers whose environment did, by question.
    """

    solved: set[str] | None = None
    failed: dict[str, set[int]] | None = None
    sampling: Sampling

    def __init__(self) -> None:
        super().__init__(self.said)

    @property
    def trainer(self) -> Any:
        return self.sampling.syncing.bridge.trainer

    def said(self, group: Group) -> list[Trajectory]:
        ids, version = group.prompt.token_ids, self.trainer.weight_version
        question = group.prompt.problem.question
        tokens = [[5]] * SIZE
        if self.solved is not None:
            tokens = [[1 if question in self.solved else 5, 9], *[[5, 9]] * (SIZE - 1)]
        failed = (self.failed or {}).get(question, set())
        return [
            Trajectory(ids, said, [-0.5] * len(said), True, [version] * len(said), 0, seed, failed=i in failed)
            for i, (said, seed) in enumerate(zip(tokens, group.seeds))
        ]


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    judge().close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_module, "_LOOK_SECONDS", 0.0)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(f'{{"question": "{i}", "answer": "#### 1"}}\n' for i in range(60)))
    return file


@pytest.fixture(autouse=True)
def few_fresh_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8rl.rl.run.feed.feed.FRESH_ANSWERS", 4)


def open_feed(data: Path, steps: int = 9, **rollout: Any) -> tuple[Feed, Engines]:
    algorithm = rollout.pop("algorithm", {})
    settings = experiment(
        run={"steps": steps},
        data={"train": str(data)},
        rollout={"prompts_per_step": PROMPTS, "group_size": SIZE, **rollout},
        algorithm={"name": "grpo", **algorithm},
        teacher={"path": "/t"} if algorithm.get("name") == "opd" else None,
        guard={"redraws": 2},
    )
    engines = Engines()
    engines.sampling = sampling_of(engines, settings, Letters(), judge())
    return Feed(settings, engines.sampling), engines


def take(feed: Feed, step: int) -> RolloutBatch:
    return feed.take(step, step - 1, StepClock())


def prompts(items: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(item.group.prompt.token_ids) for item in items]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_more_groups_than_staleness_allows_are_admitted_and_all_are_trained_on(data: Path, staleness: int) -> None:
    feed, engines = open_feed(data, staleness=staleness)
    trained: list[tuple[int, ...]] = []
    for step in range(1, 10):
        work = take(feed, step)
        trained += [tuple(answer.trajectory.prompt_ids) for answer in work.answers[::SIZE]]
        beyond = max(0, step + staleness - 9)  # after the last step, two groups of two to look at
        assert len(engines.asked) - beyond * 2 - (step - 1) * PROMPTS <= (staleness + 1) * PROMPTS
        engines.trainer.weight_version = step
        assert staleness > 0 or (feed.ahead(StepClock()), feed.state()) == (None, FeedState(step * PROMPTS, [], []))
    assert len({seed for item in engines.asked for seed in item.group.seeds}) == len(engines.asked) * SIZE
    synchronous, others = open_feed(data)
    for step in range(1, 10):
        take(synchronous, step)
    assert trained == prompts(others.asked)


def test_an_answer_whose_environment_failed_leaves_its_group_and_a_group_of_none_else_is_replaced(data: Path) -> None:
    feed, engines = open_feed(data)
    questions = [feed._problems.nth(number).question for number in range(PROMPTS)]
    engines.failed = {questions[0]: {1}, questions[1]: set(range(SIZE))}
    work = take(feed, 1)
    assert len(engines.asked) == PROMPTS + 1
    assert work.outcomes is not None and work.outcomes.groups.tolist() == [0, *[1] * SIZE, *[2] * SIZE]
    assert not any(answer.trajectory.failed for answer in work.answers)
    assert work.metrics["rollout/dropped_groups"] == 1.0


def test_the_first_answers_ahead_are_scored_while_the_others_are_sampled(data: Path) -> None:
    feed, engines = open_feed(data, staleness=1)
    take(feed, 1)
    assert not engines.asked[-1].answers.done()
    ahead = feed.ahead(StepClock())
    assert [item.answers.done() for item in engines.asked[-PROMPTS:]] == [True, True, False], "two have four answers"
    feed.drain(StepClock())
    assert engines.asked[-1].answers.done()
    assert ahead is not None and ahead.batch.rows == 4
    assert ahead.versions is not None and ahead.versions[ahead.batch.loss_mask].tolist() == [0] * 4
    assert ahead.batch.seeds is not None and (ahead.batch.seeds >= 0).sum() == 2


def test_answers_whose_environment_failed_are_not_scored_ahead(data: Path) -> None:
    feed, engines = open_feed(data, staleness=1)
    take(feed, 1)
    questions = [item.group.prompt.problem.question for item in engines.asked]
    engines.failed = {questions[PROMPTS]: {1}, questions[PROMPTS + 1]: {0}}
    ahead = feed.ahead(StepClock())
    assert ahead is not None and ahead.batch.rows == 4
    assert [item.answers.done() for item in engines.asked[-PROMPTS:]] == [True] * 3, "four sound ones are waited for"


def test_in_flight_answers_of_the_trainers_own_weights_are_waited_for(data: Path) -> None:
    feed, engines = open_feed(data, staleness=2)
    take(feed, 1)
    engines.answer()
    engines.trainer.weight_version = 1
    take(feed, 2)
    ahead = feed.ahead(StepClock())
    assert ahead is not None and ahead.versions is not None and (ahead.versions == 1).any(), "older ones say nothing"
    assert [item.answers.done() for item in engines.asked[-PROMPTS:]] == [True, False, False]


def test_the_last_steps_have_something_to_look_at_that_is_not_trained_on(data: Path) -> None:
    feed, engines = open_feed(data, steps=2, staleness=1)
    take(feed, 1)
    assert len(engines.asked) == 2 * PROMPTS
    take(feed, 2)
    assert len(engines.asked) == 2 * PROMPTS + 2
    ahead = feed.ahead(StepClock())
    assert ahead is not None and ahead.batch.rows == 4
    assert feed.state() == FeedState(2 * PROMPTS, [], []), "nothing that a later step would take"


def kept(feed: Feed, folder: Path) -> FeedState:
    """The feed's state, by way of files."""
    state = feed.state()
    for name, text in state.texts.items():
        (folder / name).write_text(text)
    return FeedState(**json.loads(json.dumps(state.extra)), answered=read_answered(folder / "groups.jsonl"))


def test_groups_that_were_answered_ahead_survive_a_checkpoint(data: Path, tmp_path: Path) -> None:
    feed, engines = open_feed(data, staleness=2)
    take(feed, 1)
    engines.answer(engines.asked[PROMPTS : PROMPTS + 2])
    engines.asked[PROMPTS].answers.result()[0].logprobs[0] = math.nan
    state = kept(feed, tmp_path)
    assert (state.next, state.admitted) == (3 * PROMPTS, list(range(PROMPTS, 3 * PROMPTS)))
    assert [group.number for group in state.answered] == [3, 4]

    resumed, others = open_feed(data, staleness=2)
    others.trainer.weight_version = 1
    resumed.restore(state)
    assert prompts(others.asked) == prompts(engines.asked[PROMPTS + 2 :]), "all but the two are asked again"
    assert [item.group.seeds for item in others.asked] == [item.group.seeds for item in engines.asked[PROMPTS + 2 :]]
    work = take(resumed, 2)
    assert [answer.trajectory.weight_versions for answer in work.answers] == [[0]] * 4 + [[1]] * 2
    assert math.isnan(work.answers[0].trajectory.logprobs[0])
    take(feed, 2)
    assert prompts(others.asked[-PROMPTS:]) == prompts(engines.asked[-PROMPTS:]), "and the next ones after them"


def test_a_checkpoint_keeps_log_probabilities_of_likely_tokens_that_are_not_numbers(tmp_path: Path) -> None:
    group, likely = Group(Prompt(Problem("q", "a"), [1]), (7,)), KeptTokens.of([[4, 5]], [math.nan, -1.0])
    answer = Trajectory([1], [5], [-1.0], True, [0], 0, 7, supports=likely)
    state = FeedState(0, [0], [SavedGroup.of(0, group, [answer])])
    (tmp_path / "groups.jsonl").write_text(state.texts["groups.jsonl"])
    (found,) = read_answered(tmp_path / "groups.jsonl")[0].trajectories()
    assert str(found.supports.logprobs.tolist()) == "[nan, -1.0]"


def test_answers_to_other_questions_or_of_other_numerics_are_asked_for_again(data: Path, tmp_path: Path) -> None:
    feed, engines = open_feed(data, staleness=1)
    take(feed, 1)
    engines.answer()
    other, others = open_feed(data, staleness=1, group_size=3)
    other.restore(kept(feed, tmp_path))
    assert len(others.asked) == PROMPTS
    same, none = open_feed(data, staleness=1)
    same.restore(kept(feed, tmp_path))
    assert none.asked == [] and take(same, 2).metrics["perf/sampling_seconds"] == 0.0, "nothing was sampled"
    feed.renew()
    assert prompts(engines.asked[-PROMPTS:]) == prompts(engines.asked[PROMPTS : 2 * PROMPTS])
    assert not engines.asked[-1].answers.done() and feed.state().answered == []


def answer_and_judge(feed: Feed, engines: Engines, *numbers: int) -> None:
    for item in feed._admitted:
        if item.number in numbers:
            engines.answer([engines.asked[item.number]])
            item.judged()


class SlowJudge(Judge):
    """Says nothing of the groups of these questions before the test lets it."""

    slow: tuple[str, ...] = ()

    def begin(self, prompt: Any, answers: Any) -> Future[Any]:
        verdict = super().begin(prompt, answers)
        if prompt.problem.question not in self.slow:
            return verdict
        self.held: Future[Any] = Future()
        return self.held


def test_a_step_takes_judged_groups_and_does_not_wait_for_a_slow_judge(data: Path) -> None:
    feed, engines = open_feed(data, staleness=1, in_flight=True, oversample=1.5)
    engines.sampling.judge = slow = SlowJudge(RewardsSection(), cast(Any, Letters()))
    slow.slow = (feed._group(1).prompt.problem.question,)
    feed._fill(1)
    engines.answer(engines.asked[1:2])
    answer_and_judge(feed, engines, 0, 2, 3, 4)
    first = prompts(engines.asked)
    work = take(feed, 1)
    assert [tuple(answer.trajectory.prompt_ids) for answer in work.answers[::SIZE]] == [first[0], first[2], first[3]]
    assert feed.state().admitted == [1, 4, 5, 6, 7, 8]
    slow.held.set_result(judge().begin(feed._group(1).prompt, engines.said(feed._group(1))).result())
    answer_and_judge(feed, engines, 5)
    engines.trainer.weight_version = 1
    work = take(feed, 2)
    assert [tuple(answer.trajectory.prompt_ids) for answer in work.answers[::SIZE]] == [first[1], first[4], first[5]]
    slow.close()


def test_a_stale_answer_where_more_are_admitted_than_needed_is_asked_for_again_once(data: Path) -> None:
    feed, engines = open_feed(data, staleness=1, in_flight=True, oversample=1.5)
    synced: list[int] = []
    engines.sampling.syncing.sync = lambda: synced.append(len(engines.asked))  # type: ignore[method-assign, assignment, return-value]
    engines.waiting = list  # type: ignore[method-assign]  # nothing is answered unless the test says so
    feed._fill(1)
    asked = len(engines.asked)
    for request in engines.asked:
        request.answers.set_exception(StaleWeightsError("of a lost trainer"))
    admit = engines.admit

    def admit_answered(*args: Any) -> Future[list[Trajectory]]:
        answers = admit(*args)
        engines.answer(engines.asked[-1:])
        return answers

    engines.admit = admit_answered  # type: ignore[method-assign]
    work = take(feed, 1)
    assert len(work.answers) == PROMPTS * SIZE and synced == [asked], "one sync for all of them"
    assert prompts(engines.asked[asked:]) == prompts(engines.asked[:asked]), "in the same order"


def test_groups_that_are_stale_twice_or_fail_end_the_wait_for_some_of_them(data: Path) -> None:
    for error, again in ((StaleWeightsError("of other weights"), 1), (EngineError("is broken"), 0)):
        feed, engines = open_feed(data, staleness=1, in_flight=True, oversample=1.5)
        engines.sampling.syncing.sync = lambda: None  # type: ignore[method-assign, assignment, return-value]
        engines.waiting = list  # type: ignore[method-assign]

        def failed(*args: Any, engines: Engines = engines, error: Exception = error) -> Future[list[Trajectory]]:
            answers = Pool.admit(engines, *args)
            answers.set_exception(error)
            return answers

        engines.admit = failed  # type: ignore[method-assign]
        with pytest.raises(type(error)):
            take(feed, 1)
        assert len(engines.asked) == 9 * (1 + again)


def test_groups_of_equal_rewards_are_replaced_by_further_ones(data: Path) -> None:
    synchronous, everything = open_feed(data)
    for step in (1, 2, 3):
        take(synchronous, step)
    order = [item.group.prompt.problem.question for item in everything.asked]
    feed, engines = open_feed(data, algorithm={"dynamic_sampling": True})
    engines.solved = {order[0], order[4], order[6], order[7]}
    work = take(feed, 1)
    taken = [answer.problem.question for answer in work.answers[::SIZE]]
    assert taken == [order[0], order[4], order[6]]
    assert work.metrics["rollout/dropped_groups"] == 4 and work.metrics["rollout/dropped_tokens_mean"] == 2.0
    assert work.metrics["rollout/dropped_reward_mean"] == 0.0
    assert work.metrics["rollout/equal_reward_groups"] == 0
    assert feed.state().admitted == [] and feed.state().next == 7, "no more were admitted than it took"


def test_a_filter_that_keeps_nothing_is_given_up_after_a_bounded_number_of_groups(data: Path) -> None:
    feed, engines = open_feed(data, filter_patience=4, algorithm={"dynamic_sampling": True})
    engines.solved = set()
    with pytest.raises(FilterError, match=r"found 12 groups that the grpo algorithm does not train on \(mean rewa"):
        take(feed, 1)
    assert len(engines.asked) == 12


def test_a_teachers_logprobs_stand_beside_the_engines_and_make_the_advantages(data: Path) -> None:
    feed, engines = open_feed(data, algorithm={"name": "opd"}, staleness=1)
    teacher: Any = SimpleNamespace(score=lambda rows: done([[0.0] * (len(row) - 3) + [-1.0, -2.0] for row in rows]))  # type: ignore[misc]
    engines.sampling.judge, engines.solved = Judge(RewardsSection(), cast(Any, Letters()), teacher=teacher), set()
    work = take(feed, 1)
    batch, mask = work.batch, work.batch.loss_mask
    assert batch.fields["teacher_logprobs"][mask].tolist() == [-1.0, -2.0] * PROMPTS * SIZE
    advantages = feed._experiment.algorithm.advantages(work.outcomes, batch)
    assert advantages[mask].tolist() == [-0.5, -1.5] * PROMPTS * SIZE, "the engine says -0.5"
    assert (batch.fields["teacher_logprobs"][~mask] == 0).all()
    records = rollout_records(work, torch.zeros(batch.tokens.shape))
    assert [record.teacher_logprobs for record in records] == [[-1.0, -2.0]] * PROMPTS * SIZE
    assert [record.reference for record in records] == ["#### 1", None] * PROMPTS, "one for each prompt"
    ahead = feed.ahead(StepClock())
    assert ahead is not None and ahead.batch.fields.keys() == {"rollout_logprobs"}, "nothing is learnt from them"
    engines.sampling.judge.close()
