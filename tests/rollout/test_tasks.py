"""Loading problems and judging answers."""

import subprocess
import sys
import threading
import time
from typing import get_args

import pytest

from numerics.errors import UserError
from rollout import rewards
from rollout.rewards import REWARDS, RewardKind
from rollout.tasks import Problem, load_problems, verify

GOOD = b'{"question": "2+3=?", "answer": "#### 5"}\n'


def test_every_kind_of_reward_has_a_row() -> None:
    assert REWARDS.keys() == set(get_args(RewardKind))


def test_problems_are_read_in_order_and_extra_keys_ignored(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD + '{"question": "é\u2028?", "answer": "x #### -1", "level": 3}'.encode())
    assert load_problems(path) == [Problem("2+3=?", "#### 5"), Problem("é\u2028?", "x #### -1")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{not json}\n", "valid JSON"),
        (b"\n", "valid JSON"),
        (b"[1, 2]\n", "JSON object"),
        (b'{"question": "q"}\n', "'answer'"),
        (b'{"question": "q", "answer": 5}\n', "answer"),
        (b'{"question": " ", "answer": "5"}\n', "question"),
        (b'{"question": "\\ud800", "answer": "5"}\n', "question"),
        (b"[" * 100_000 + b"\n", "valid JSON"),
        (b'{"question": ' + b"1" * 5000 + b"}\n", "valid JSON"),
        (b'{"question": "\xff", "answer": "5"}\n', "UTF-8"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path, line, reason):
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD + line + GOOD)
    with pytest.raises(UserError, match=reason) as error:
        load_problems(path, "data.train")
    assert "data.train" in str(error.value) and "line 2 of" in str(error.value) and "p.jsonl" in str(error.value)


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="existing JSONL file"):
        load_problems(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match="at least one problem"):
        load_problems(tmp_path / "empty.jsonl")


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("13,18,10\n#### 10", 1.0),
        ("####10", 1.0),
        ("#### 9 no\n#### 10", 1.0),
        ("#### 010", 1.0),
        ("10", 0.0),
        ("#### 10\n", 0.0),
        ("#### 10 ", 0.0),
        ("#### 10.0", 0.0),
        ("#### 10 #### 9", 0.0),
        ("#### 10 ####", 0.0),
        ("#### 1_0", 0.0),
        ("#### 110", 0.0),
        ("#### -10", 0.0),
        ("#### " + "1" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_integer_reward_wants_the_exact_integer_at_the_very_end(text, reward):
    assert verify(Problem("9+4+5-8=?", "13,18,10\n#### 10"), text, True, "integer") == reward


def test_integer_reward_reads_signs_and_thousands():
    assert verify(Problem("q", "#### -2,125"), "#### -2125", True, "integer") == 1.0
    assert verify(Problem("q", "#### 2,125"), "#### 21,25", True, "integer") == 0.0


def test_an_unfinished_answer_earns_nothing():
    for kind in ("integer", "math"):
        assert verify(Problem("q", "#### 10"), "#### 10", False, kind) == 0.0


def test_a_reference_answer_without_integer_is_the_users_error():
    with pytest.raises(UserError, match="data.reward=math"):
        verify(Problem("q", "one half"), "#### 1", True, "integer")


@pytest.fixture
def math_process():
    """A fresh child for each test, ended with it."""
    rewards._math_verify.close()
    yield rewards._math_verify
    rewards._math_verify.close()


def test_math_reward_compares_values_and_works_in_any_thread(math_process):
    cases = [
        (r"so it is $\frac{1}{2}$", "#### 0.5", 1.0),
        (r"\boxed{x^2+2x+1}", r"#### (x+1)^2", 1.0),
        (r"\boxed{0.25}", "#### 1/2", 0.0),
        ("#### 11", "#### 10", 0.0),
        ("13,18,10\n#### 10", "4+4\n#### 10", 1.0),
        ("", "#### 10", 0.0),
    ]
    results: list[float] = []

    def run() -> None:
        results.extend(verify(Problem("q", answer), text, True, "math") for text, answer, _ in cases)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert results == [reward for *_, reward in cases]


def test_an_answer_that_never_ends_is_wrong_and_the_next_one_is_judged(math_process, monkeypatch):
    assert verify(Problem("q", "#### 1/2"), "0.5", True, "math") == 1.0
    first = math_process._process
    monkeypatch.setattr(rewards, "ANSWER_SECONDS", 0.0)
    began = time.monotonic()
    assert verify(Problem("q", "#### 1/3"), r"\frac{1}{3}", True, "math") == 0.0
    assert time.monotonic() - began < 2.0
    assert first.poll() is not None, "the silent child was left behind"
    monkeypatch.undo()
    assert verify(Problem("q", "#### 1/3"), r"\frac{1}{3}", True, "math") == 1.0


def test_the_math_process_ends_with_its_parent():
    script = (
        "import os; from rollout import rewards; from rollout.tasks import *;"
        "verify(Problem('q', '#### 1/2'), '0.5', True, 'math');"
        "print(rewards._math_verify._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    child = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout)
    deadline = time.monotonic() + 15
    while _alive(child):
        assert time.monotonic() < deadline, f"process {child} survived its parent"
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
