"""Reward functions that a spec names: found, or refused before anything starts."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fp8rl.numerics.core.errors import UserError
from fp8rl.rollout.tasks.named_functions import ReturnError
from fp8rl.rollout.tasks.rewards import RewardFunction, RewardSection, RewardsSection, load_function

ALL = {"question": "q", "answer": "a", "reference": "r", "finished": True, "tokens": 3}
MODULE = """
import sys

def short(answer: str, limit: int = 10) -> float:
    return float(len(answer) < limit)

def ranked(answers, tokens):
    return [float(rank) for rank in tokens]

async def asked(question, answer): ...

def both(answer, answers): ...

def needy(answer, threshold): ...

number = 3

class Judge:
    async def __call__(self, question, answer): ...

judge = Judge()
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "broken.py").write_text("def short(answer: return 1\n")
    (tmp_path / "raises.py").write_text("def __getattr__(name):\n    raise RuntimeError(name)")
    os.mkfifo(tmp_path / "pipe.py")
    return tmp_path


def loaded(function: str, **kwargs: Any) -> RewardFunction:
    return load_function(RewardSection(function=function, kwargs=kwargs), "rewards.functions.0")


def test_a_function_is_found_and_gets_what_it_asks_for(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = loaded(f"{module}/mine.py:short", limit=1)
    assert short(ALL) == 0.0 and short(ALL | {"answer": ""}) == 1.0
    assert not short.of_group and not short.is_async
    monkeypatch.syspath_prepend(str(module))
    assert loaded("mine:short")(ALL) == 1.0
    assert loaded(f"{module}/mine.py:ranked").of_group
    assert all(loaded(f"{module}/mine.py:{name}").is_async for name in ("asked", "judge"))


@pytest.mark.parametrize(
    ("function", "kwargs", "expected"),
    [
        ("maths", {}, "Did you mean math? Correct the name"),
        ("{}/mine.py:long", {}, "expected a function or class of {}/mine.py, which has short, ranked, asked"),
        ("{}/broken.py:short", {}, "SyntaxError"),
        ("{}/leaves.py:short", {}, "this one ends in SystemExit: 3"),
        ("{}/raises.py:reward", {}, "RuntimeError: reward"),
        ("{}/pipe.py:reward", {}, "a pipe, no regular file"),
        ("{}/mine.py:both", {}, "expected a function of answer, or of answers for a whole group"),
        ("{}/mine.py:needy", {}, "kwargs give no threshold"),
        ("{}/mine.py:short", {"limits": 3}, "rewards.functions.0.kwargs: found 'limits'"),
        ("format", {}, "kwargs give no pattern"),
        ("builtins:max", {}, "expected a function whose parameters Python can tell"),
    ],
)
def test_what_cannot_be_called_is_refused(module: Path, function: str, kwargs: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as error:
        loaded(function.replace("{}", str(module)), **kwargs)
    assert str(error.value).startswith("rewards.functions.0.")
    assert expected.replace("{}", str(module)) in str(error.value)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("1.0", "found str '1.0', expected a number or named numbers"),
        (float("nan"), "found nan, expected a finite number"),
        ({"a": 0.5, "b": -1e300}, "found -1e\\+300, expected a finite number in FP32"),
        (10**400, "found inf, expected a finite number in FP32"),
        ({}, "found dict {}"),
    ],
)
def test_only_numbers_are_rewards(module: Path, returned: Any, expected: str) -> None:
    with pytest.raises(ReturnError, match=expected.replace("{}", r"\{\}")):
        loaded(f"{module}/mine.py:short").parts(returned, 1)


def test_a_group_gets_a_reward_for_each_answer(module: Path) -> None:
    ranked = loaded(f"{module}/mine.py:ranked")
    assert ranked.parts([1, {"a": 2.5, "b": True}], 2) == [{"": 1.0}, {"a": 2.5, "b": 1.0}]
    assert ranked.parts(np.array([1, 0.5]), 2) == ranked.parts(torch.tensor([1, 0.5]), 2) == [{"": 1.0}, {"": 0.5}]
    with pytest.raises(ReturnError, match="expected a list of 3 rewards, one per answer"):
        ranked.parts([1.0, 2.0], 3)


def test_a_list_stands_for_the_functions_and_their_labels_differ() -> None:
    assert RewardsSection.model_validate([{"function": "math"}]).functions[0].function == "math"
    with pytest.raises(ValidationError, match="found two functions called short, expected different"):
        RewardsSection.model_validate([{"function": "a:short"}, {"function": "b:short"}])
    named = RewardsSection.model_validate([{"function": "a:short"}, {"function": "b:short", "name": "other"}])
    assert [function.label for function in named.functions] == ["short", "other"]


def test_a_file_is_imported_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    said, module = tmp_path / "said", tmp_path / "counted.py"
    text = f"from pathlib import Path\nwith Path({str(said)!r}).open('a') as log: log.write('x')\n"
    for functions, times in (("def one(answer): return 1.0", 1), ("def one(answer): return 2.0", 2)):
        module.write_text(text + functions)
        first, second = (load_function(RewardSection(function=f"{module}:one"), "rewards.0") for _ in range(2))
        assert first.call is second.call and said.read_text() == "x" * times
