"""Rewards beside the loop: ours and users', plain and async, of answers and of groups, and those that misbehave."""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fp8rl.rl.record.history import Event, append_entry, read_events
from fp8rl.rl.run.background import BlockedError
from fp8rl.rl.run.events import TooManyFailuresError
from fp8rl.rl.run.feed.judging import Judge, JudgedAnswer
from fp8rl.rollout.tasks.rewards import RewardsSection
from fp8rl.rollout.types import EngineError, Problem, Prompt, Trajectory
from tests.support.pools import told
from tests.support.servers import group_members, wait_until

MODULE = """
import asyncio, os, sys, time

def letters(answer):
    return {"letters": len(answer), "digits": sum(letter.isdigit() for letter in answer)}

def ranked(answers, tokens, finished, reference):
    return [float(sorted(tokens).index(count)) for count in tokens]

def levelled(answer, fields):
    return fields["level"]

async def changes(answer, turns, outcome, fields):
    turns.append(("model", "#### 3"))
    outcome["won"] = fields["level"] = 100.0
    return 1.0

def large(answer):
    return 3e38

async def asks(answer):
    raise TimeoutError("of a request")

async def blocks(answer):
    time.sleep(1000)

def stuck(answer):
    import re
    return float(bool(re.fullmatch(r"(a+)+b", "a" * 40)) or 1)

def raises(answer):
    raise ValueError("no such thing" + chr(0xD83D))

def dies(answer):
    os._exit(4)

def forks(answer):
    os.fork()
    return 1.0

def leaves_children(answer):
    if os.fork() == 0:
        time.sleep(1000)
    return 1.0

def prints(answer):
    for _ in range(100):
        print("x" * 1_000_000)
    return 1.0

def reads(answer):
    return float(len(sys.stdin.read()))

def eats(answer):
    return float(len(bytearray(10 << 30)))

def whole(answers):
    return [1.0]
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mine") / "mine.py"
    path.write_text(MODULE)
    return path


Make = Callable[..., Judge]


@pytest.fixture
def make(module: Path, tokenizer: Any) -> Iterator[Make]:
    judges = []

    def made(*functions: str | dict[str, Any], **settings: Any) -> Judge:
        entries = [{"function": entry} if isinstance(entry, str) else entry for entry in functions]
        named = [e | {"function": e["function"].replace("mine:", f"{module}:")} for e in entries]
        judges.append(Judge(RewardsSection.model_validate({"functions": named, **settings}), tokenizer))
        return judges[-1]

    yield made
    for judge in judges:
        judge.close()


def group(tokenizer: Any, *answers: str, **fields: Any) -> tuple[Prompt, list[Trajectory]]:
    prompt = Prompt(Problem("1+2=?", "3\n#### 3", fields=fields), [1])
    trajectories = []
    for answer in answers:
        ids = [*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        trajectories.append(Trajectory([1], ids, [-1.0] * len(ids), True, [0] * len(ids), 0, seed=1))
    return prompt, trajectories


def judged(judge: Judge, tokenizer: Any, *answers: str) -> list[JudgedAnswer]:
    return judge.begin(*group(tokenizer, *answers)).result(timeout=60)


def test_a_reward_is_the_weighted_sum_of_what_the_functions_say(make: Make, tokenizer: Any) -> None:
    judge = make({"function": "integer", "weight": 2.0}, {"function": "mine:letters", "weight": 0.5}, "mine:ranked")
    right, wrong = judged(judge, tokenizer, "3\n#### 3", "12")
    assert (right.text, wrong.text) == ("3\n#### 3", "12")
    assert right.parts == {"integer": 1.0, "letters/letters": 8.0, "letters/digits": 2.0, "ranked": 1.0}
    assert right.reward == 2.0 + 0.5 * 10.0 + 1.0
    assert wrong.parts == {"integer": 0.0, "letters/letters": 2.0, "letters/digits": 2.0, "ranked": 0.0}
    assert wrong.reward == 2.0 and not told(judge.failures.events)


def test_a_sum_that_is_not_finite_in_fp32_is_a_failure(make: Make, tokenizer: Any) -> None:
    judge = make("mine:large", {"function": "mine:large", "name": "again", "weight": 0.5})
    (answer,) = judged(judge, tokenizer, "3")
    assert answer.reward == 0.0 and answer.parts == {"large": 3e38, "again": 3e38}
    ((_, message),) = told(judge.failures.events)
    assert "the reward sum has failed, which counts as 0: found 4.5" in message and "finite number in FP32" in message


def test_what_a_function_does_to_its_arguments_reaches_nobody(make: Make, tokenizer: Any) -> None:
    prompt, (answer,) = group(tokenizer, "12")
    prompt = replace(prompt, problem=replace(prompt.problem, fields={"level": 1.0}))
    answer = replace(answer, outcome={"won": 0.5})
    judge = make("mine:changes", {"function": "environment", "kwargs": {"part": "won"}}, "mine:levelled")
    (verdict,) = judge.begin(prompt, [answer]).result(timeout=60)
    assert verdict.parts == {"changes": 1.0, "environment": 0.5, "levelled": 1.0}
    assert verdict.said == [("model", "12")] and answer.outcome == {"won": 0.5}
    assert prompt.problem.fields == {"level": 1.0}


def test_an_answer_whose_environment_failed_is_worth_nothing_and_not_judged(make: Make, tokenizer: Any) -> None:
    prompt, answers = group(tokenizer, "3\n#### 3", "1", "2")
    judge = make("mine:ranked", "integer")
    verdicts = judge.begin(prompt, [answers[0], replace(answers[1], failed=True), answers[2]]).result(timeout=60)
    first, *others = ({"ranked": value, "integer": value} for value in (1.0, 0.0))
    assert [verdict.parts for verdict in verdicts] == [first, {}, *others]


def test_a_teacher_that_finds_a_token_impossible_ends_the_run(make: Make, tokenizer: Any) -> None:
    judge, scores = make("integer"), Future[list[list[float]]]()
    scores.set_result([[math.nan] * 2])
    judge._teacher = SimpleNamespace(score=lambda sequences: scores)  # type: ignore[assignment]
    with pytest.raises(EngineError, match="found 2 log-probabilities of the teacher that are not finite.*teacher.path"):
        judge.wait(judge.begin(*group(tokenizer, "1")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("stuck", "it took more than 1 s"),
        ("raises", "ValueError: no such thing?"),
        ("asks", "TimeoutError: of a request"),
        ("dies", "it ended its process"),
        ("eats", "MemoryError"),
        ("whole", "expected a list of 2 rewards, one per answer"),
    ],
)
def test_a_function_that_fails_is_explained_once(
    make: Make, tokenizer: Any, function: str, expected: str, tmp_path: Path
) -> None:
    seconds = 1.0 if function == "stuck" else 30.0
    judge = make({"function": f"mine:{function}", "timeout_s": seconds}, "integer", workers=1)
    answers = judged(judge, tokenizer, "3\n#### 3", "1")
    assert [answer.reward for answer in answers] == [1.0, 0.0]
    judge.failures.tell()
    (one, first), *others = told(judge.failures.events)
    assert one == 1 and f"the reward {function} has failed, which counts as 0" in first and expected in first
    event = Event(1, "rollout/reward_failures", 1.0, "above 0", "go_on", None, first)
    append_entry(tmp_path / "events.jsonl", event)
    assert read_events(tmp_path / "events.jsonl") == [event], "else the run could not be resumed"
    assert others == ([] if function == "whole" else [(1, "1 more rewards failed")])
    assert not told(judge.failures.events)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["forks", "prints", "reads", "leaves_children"])
def test_what_a_function_does_to_its_process_reaches_nobody(make: Make, tokenizer: Any, function: str) -> None:
    judge = make({"function": f"mine:{function}", "timeout_s": 20.0}, workers=1)
    for _ in range(2):
        rewards = [answer.reward for answer in judged(judge, tokenizer, "1", "2")]
        assert rewards == [0.0 if function == "reads" else 1.0] * 2
    (worker,) = judge._workers._all
    left = 5 if function == "leaves_children" else 1
    assert wait_until(lambda: len(group_members(worker._process.pid)) == left, 10)  # type: ignore[union-attr]
    processes = group_members(worker._process.pid)
    judge.close()
    assert not psutil.wait_procs(processes, timeout=10)[1]


def test_too_many_failures_end_the_run(make: Make, tokenizer: Any) -> None:
    judge = make("mine:raises", max_failures=2)
    assert [answer.reward for answer in judged(judge, tokenizer, "1", "2")] == [0.0, 0.0]
    expected = r"(?s)found 3 failures of rewards, expected at most 2 \(.*max_failures\). Correct the reward.*ValueError"
    with pytest.raises(TooManyFailuresError, match=expected):
        judged(judge, tokenizer, "1")


@pytest.mark.slow
def test_an_async_function_that_never_awaits_ends_the_run(make: Make, tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("fp8rl.rl.run.background._TURN_SECONDS", 0.5)
    judge = make(*({"function": name, "timeout_s": 0.2} for name in ("mine:blocks", "integer")))
    began = time.monotonic()
    with pytest.raises(BlockedError, match=r"found an async reward \(blocks\) that has blocked all others"):
        judge.wait(judge.begin(*group(tokenizer, "1")))
    judge.close()
    assert time.monotonic() - began < 40
