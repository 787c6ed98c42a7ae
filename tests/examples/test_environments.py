"""Environments of the examples, with a model whose lines are given; Python code that goes wrong harms nobody."""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.environments import calculator, guess, worked_out
from examples.python_tool import LONGEST_OUTPUT, Ran, last_block, python, run_python
from fp8rl.rollout.tasks.environments.conversation import transcript
from tests.support.conversations import EOS, Stage
from tests.support.servers import wait_until


def text(play: Stage, tokenizer: Any, *arguments: Any, **settings: Any) -> tuple[str, dict[str, float]]:
    answer = play(*arguments, **settings)
    return "".join(said for _, said in transcript(answer, tokenizer)), answer.outcome


def test_the_calculator_works_out_what_the_model_writes_before_an_equals_sign(play: Stage, tokenizer: Any) -> None:
    said, outcome = text(play, tokenizer, calculator, "(9+4=", ",(what=", ",(3*-2=", "\n#### 7" + EOS)
    assert said == "(9+4=13),(what=?),(3*-2=-6)\n#### 7"
    assert outcome == {"calls": 3.0, "unread": 1.0}
    said, outcome = text(play, tokenizer, partial(calculator, calls=1), "(9+4=", ",(1+1=2" + EOS)
    assert said == "(9+4=13),(1+1=2" and outcome["calls"] == 1.0


@pytest.mark.parametrize(
    ("written", "value"),
    [("9+4", 13), ("13 - 18", -5), ("-3*4", -12), ("9", None), ("9+", None), ("1/2", None), ("9" * 10 + "+1", None)],
)
def test_what_the_calculator_can_read(written: str, value: int | None) -> None:
    assert worked_out(written) == value


def test_a_guess_is_answered_by_which_way_the_number_is(play: Stage, tokenizer: Any) -> None:
    said, outcome = text(play, tokenizer, guess, "9", "2", "5", answer="#### 5")
    assert said == "9<,2>,5" and outcome == {"reward": 1.0, "guesses": 3.0}
    said, outcome = text(play, tokenizer, guess, "x", "4", "6", answer="#### 5")
    assert said == "x?,4>,6" and outcome == {"reward": 0.0, "guesses": 3.0}
    said, outcome = text(play, tokenizer, partial(guess, tries=1), "5", answer="#### 5")
    assert said == "5" and outcome == {"reward": 1.0, "guesses": 1.0}


@pytest.mark.slow
def test_python_code_is_run_and_its_output_comes_back_as_a_message(play: Stage, tokenizer: Any) -> None:
    lines = ["try ```python\nprint(6*7)\n```" + EOS, "```python\n1/0\n```" + EOS, "#### 42" + EOS]
    answer = play(python, *lines, max_new_tokens=400)
    assert answer.outcome == {"calls": 2.0, "errors": 1.0}
    said = [words for by, words in transcript(answer, tokenizer) if by == "environment"]
    assert said[0] == "<|user|>42\n<|assistant|>" and "ZeroDivisionError" in said[1]


def test_the_last_whole_block_counts() -> None:
    assert last_block("a ```python\nx=1\n``` b ```python\nx=2\n``` c") == "x=2"
    assert last_block("none, or ```python\n not ended") is None


def ran(code: str, timeout_s: float = 20.0, memory_mib: int = 256) -> Ran:
    return asyncio.run(run_python(code, timeout_s=timeout_s, memory_mib=memory_mib))


@pytest.mark.slow
def test_output_comes_back_and_is_bounded() -> None:
    assert ran("print(2 + 3)") == Ran("5\n", True)
    assert len(ran("for _ in range(1000): print('y' * 1000)").text) == LONGEST_OUTPUT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "expected"),
    [("1/0", "ZeroDivisionError"), ("x = 'a' * 10**10", "MemoryError"),
     ("open('file', 'w').write('x' * 10**8)", "File too large"),
     ("import os; os.kill(os.getpid(), 9)", "it was ended by signal 9"), ("input()", "EOFError")],
)  # fmt: skip
def test_an_error_is_told(code: str, expected: str) -> None:
    found = ran(code)
    assert not found.ok and expected in found.text


@pytest.mark.slow
def test_there_is_no_network_here_or_in_a_child() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connects = f"import socket; socket.create_connection({server.getsockname()!r})"
        assert "PermissionError" in ran(connects).text
        child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {connects!r}])"
        assert "PermissionError" in ran(child).text


@pytest.mark.slow
def test_time_is_bounded_and_children_end_too_even_those_of_another_session() -> None:
    mark = uuid.uuid4().hex
    sleeps = f"import os, time\nos.setsid() if os.fork() == 0 else 0\ntime.sleep(600)  # {mark}"
    began = time.monotonic()
    code = f"import subprocess, sys\nfor _ in range(3): subprocess.Popen([sys.executable, '-c', {sleeps!r}])\n" + sleeps
    found = ran(code, timeout_s=2.0)
    assert found == Ran("\nit took more than 2 s", False) and time.monotonic() - began < 20 and not _with_mark(mark)


@pytest.mark.slow
def test_who_gives_up_waiting_leaves_nothing_running() -> None:
    mark = uuid.uuid4().hex

    async def given_up() -> None:
        await asyncio.wait_for(run_python(f"import time; time.sleep(600)  # {mark}", timeout_s=600), 2)

    before = set(Path("/tmp").glob("fp8rl-python-*"))
    with pytest.raises(TimeoutError):
        asyncio.run(given_up())
    assert wait_until(lambda: not set(Path("/tmp").glob("fp8rl-python-*")) - before, 5)


def _with_mark(mark: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if any(mark in part for part in p.info["cmdline"] or [])]
