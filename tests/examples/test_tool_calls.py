"""The chains that are worked out by calls of a tool."""

import json
import sys

from examples import tool_calls
from fp8rl.rollout.tasks.environments.recording import parse_calls
from tests.support.paths import EXAMPLES

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
