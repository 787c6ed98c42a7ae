"""Problems and rewards of the pretrained example, and of chains that are worked out by calls of a tool."""

import json
import sys

import pytest

from examples import smollm2, tool_calls
from fp8rl.rollout.tasks.environments.recording import parse_calls
from tests.support.paths import EXAMPLES


def test_no_problem_is_trained_on_and_held_out(tmp_path) -> None:
    smollm2.write_problems(tmp_path)
    train, held_out = (
        [json.loads(line) for line in (tmp_path / f"sums_{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval")
    )
    assert len(train) == 128 and len({row["question"] for row in train + held_out}) == 128 + 43
    for row in train + held_out:
        first, second = map(int, row["question"].removesuffix(" =").split(" + "))
        assert row["answer"] == str(first + second)


@pytest.mark.parametrize(
    ("answer", "finished", "reward"),
    [("12", True, 1.0), ("7 + 5 = 12.", True, 1.0), ("12", False, 0.0), ("12 or 13", True, 0.0), ("twelve", True, 0.0)],
)
def test_the_reward_is_the_last_number_of_a_finished_answer(answer: str, finished: bool, reward: float) -> None:
    assert smollm2.number(answer, "12", finished) == reward


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_the_problems_are_what_the_script_writes_and_its_calls_are_read_by_the_parser(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tool_calls", "--out", str(tmp_path)])
    tool_calls.main()
    problems = (tmp_path / "tool_calls_train.jsonl").read_text()
    assert problems == (EXAMPLES / "data/tool_calls_train.jsonl").read_text()
    rows = [json.loads(line) for line in (tmp_path / "tool_calls_sft.jsonl").read_text().splitlines()]
    for problem, (first, second, last) in zip(problems.splitlines(), zip(*[iter(rows)] * 3, strict=True), strict=True):
        question, answer = json.loads(problem).values()
        assert eval(question.removesuffix("=?")) == int(answer.removeprefix("#### "))
        assert first["question"] == [{"role": "user", "content": question}] and last["answer"] == answer
        told = [message["content"] for message in last["question"] if message["role"] == "tool"]
        for row, result in zip((first, second), told, strict=True):
            text, (call,) = parse_calls(row["answer"], [ADD], "qwen25", 0)
            arguments = json.loads(call["function"]["arguments"])
            assert text == "" and str(arguments["a"] + arguments["b"]) == result
