"""Groups of conversations, between a user's environment and engines that play their part."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from fp8rl.rl.run.background import BlockedError
from fp8rl.rl.run.events import TooManyFailuresError
from fp8rl.rl.run.feed.conversations import Conversations
from fp8rl.rl.run.feed.sampling import done
from fp8rl.rollout.tasks.environments import EnvironmentSection
from fp8rl.rollout.types import EngineError, Group, Problem, Prompt, SamplingParams, Trajectory
from tests.support.paths import EXAMPLES
from tests.support.pools import told
from tests.support.servers import wait_until

ENVIRONMENTS = """
import asyncio, time

async def talks(conversation):
    while (turn := await conversation.sample(max_new_tokens=2)).text != "99":
        conversation.tell("+")
    return {"turns": conversation.turns}

async def raises(conversation):
    await conversation.sample()
    raise KeyError("no such thing")

async def sometimes(conversation):
    turn = await conversation.sample()
    if turn.text != "99":
        raise KeyError("no such thing")
    return 1.0

async def hangs(conversation):
    await conversation.sample()
    await asyncio.sleep(600)

async def asks(conversation):
    raise TimeoutError("of a request")

async def blocks(conversation):
    time.sleep(3)

async def cancels(conversation):
    raise asyncio.CancelledError

async def tokens(conversation):
    await conversation.sample()
    return [5, 6, 7]

async def silent(conversation):
    return 1.0
"""
SAMPLING = SamplingParams(16, stop_token_ids=(2,))


class Engines:
    """Answers a turn of seed n with the digit n twice, and from the n-th turn of the conversation on with 99."""

    def __init__(self, tokenizer: Any) -> None:
        self.nine, self.tokenizer = tokenizer("9").input_ids[0], tokenizer
        self.near: dict[int, set[int]] = {}
        self.error: Exception | None = None

    def ask(self, group: Group, sampling: SamplingParams, oldest: int, near: object) -> Future[list[Trajectory]]:
        (seed,) = group.seeds
        turns = self.near.setdefault(seed, set())
        turns.add(id(near))
        if self.error is not None:
            future: Future[list[Trajectory]] = Future()
            future.set_exception(self.error)
            return future
        said = len(group.prompt.token_ids) // 3 + 1
        digit = self.nine if said >= seed else self.tokenizer(str(seed)).input_ids[0]
        return done([Trajectory(group.prompt.token_ids, [digit] * 2, [-1.0] * 2, False, [oldest] * 2, 0, seed)])


Make = Callable[..., Conversations]


@pytest.fixture
def engines(tokenizer: Any) -> Engines:
    return Engines(tokenizer)


@pytest.fixture
def make(tmp_path: Path, tokenizer: Any, engines: Engines) -> Iterator[Make]:
    (tmp_path / "mine.py").write_text(ENVIRONMENTS)
    made: list[Conversations] = []

    def opened(function: str, **settings: Any) -> Conversations:
        config = EnvironmentSection(function=f"{tmp_path / 'mine.py'}:{function}", **settings)
        made.append(Conversations(config, tokenizer, engines.ask))
        return made[-1]

    yield opened
    for conversations in made:
        conversations.close()


def begun(conversations: Conversations, *seeds: int) -> Future[list[Trajectory]]:
    return conversations.begin(Group(Prompt(Problem("?", "!"), [1]), seeds), SAMPLING, oldest=3)


def test_each_answer_is_a_conversation_of_its_own_length_at_one_engine(make: Make, engines: Engines) -> None:
    answers = begun(make("talks"), 1, 3, 2).result(timeout=20)
    assert [answer.seed for answer in answers] == [1, 3, 2]
    assert [answer.outcome for answer in answers] == [{"turns": 1.0}, {"turns": 3.0}, {"turns": 2.0}]
    assert [len(answer.environment_spans) for answer in answers] == [0, 2, 1]
    assert [answer.weight_versions for answer in answers] == [[3] * 2, [3] * 6, [3] * 4]
    assert all(len(places) == 1 for places in engines.near.values()) and len(set.union(*engines.near.values())) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("raises", "KeyError: 'no such thing'"),
        ("hangs", "it took more than 0.5 s between two turns (environment.timeout_s)"),
        ("asks", "TimeoutError: of a request"),
        ("cancels", "RuntimeError: found a CancelledError of a function's own, expected it to catch"),
        ("tokens", "it returned list [5, 6, 7], expected nothing, a number or named numbers, finite in FP32; text"),
        ("silent", "it ended before the model's first turn, expected it to call sample()"),
    ],
)
def test_an_environment_that_fails_is_counted_and_explained_once(make: Make, function: str, expected: str) -> None:
    """The first failure is told when it happens, and others when a step ends."""
    conversations = make(function, timeout_s=0.5)
    answers = begun(conversations, 1, 2, 3).result(timeout=20)
    assert [answer.failed for answer in answers] == [True] * 3
    ((one, first),) = told(conversations.failures.events)
    assert one == 1 and f"the environment {function} has failed, so that nothing is learnt" in first
    conversations.failures.tell()
    assert expected in first and told(conversations.failures.events) == [(2, "2 more environments failed")]


@pytest.mark.parametrize(
    ("most", "seeds", "said"),
    [
        (1, 2, r"(?s)found 2 failures of environments, expected at most 1 \(env.*Key"),
        (1000, 32, "(?s)the first 8 calls of the environment raises have all.*Key"),
    ],
)
def test_too_many_failures_or_the_first_ones_alike_end_the_run(make: Make, most: int, seeds: int, said: str) -> None:
    with pytest.raises(TooManyFailuresError, match=said):
        begun(make("raises", max_failures=most), *range(1, seeds + 1)).result(timeout=20)


def test_one_conversation_that_succeeds_leaves_the_others_their_failures(make: Make) -> None:
    conversations = make("sometimes", max_failures=1000)
    answers = begun(conversations, 1, *[2] * 20).result(timeout=20)
    assert [answer.failed for answer in answers] == [answer.seed != 1 for answer in answers]


@pytest.mark.slow
def test_an_end_waits_for_no_request_of_a_program(tokenizer: Any) -> None:
    asked: list[Future[list[Trajectory]]] = []
    harness = {"program": f"{EXAMPLES / 'agent.py'}:solve", "tool_parser": "qwen25"}
    config = EnvironmentSection.model_validate({"function": "harness", "harness": harness})
    conversations = Conversations(config, tokenizer, lambda *_: asked.append(Future()) or asked[0], 100)
    answers = begun(conversations, 1)
    assert wait_until(lambda: bool(asked), 60)
    began = time.monotonic()
    conversations.close()
    assert time.monotonic() - began < 15 and answers.cancelled() and told(conversations.failures.events) == []


def test_an_error_of_the_engines_is_not_the_environments(make: Make, engines: Engines) -> None:
    engines.error = EngineError("all engines are lost")
    conversations = make("talks")
    with pytest.raises(EngineError, match="all engines are lost"):
        begun(conversations, 1).result(timeout=20)
    assert told(conversations.failures.events) == []


@pytest.mark.slow
def test_an_environment_that_never_awaits_ends_the_run_instead_of_holding_it_up(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    monkeypatch.setattr("fp8rl.rl.run.background._TURN_SECONDS", 0.5)
    conversations = make("blocks", timeout_s=0.3)
    waiting = begun(conversations, 1, 2)

    async def looked() -> None:
        while not waiting.done():
            conversations.check()
            await asyncio.sleep(0.05)

    with pytest.raises(BlockedError, match=r"found an environment \(blocks\) that has blocked all"):
        asyncio.run(looked())
