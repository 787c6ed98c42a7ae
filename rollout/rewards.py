"""Rewards of an answer that can be verified. Each has a row in REWARDS; an experiment names one (`data.reward`)."""

from __future__ import annotations

import atexit
import json
import re
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from numerics.errors import user_error

INTEGER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,100})")
START_SECONDS = 120.0  # a cold import of sympy on a busy machine
ANSWER_SECONDS = 5.0


def integer_reward(text: str, answer: str) -> bool:
    """Whether the integer after the last `####` closes `text` and equals the one that closes `answer`.

    Raises:
        UserError: `answer` does not end in `####` and an integer.
    """
    gold = final_integer(answer)
    if gold is None:
        raise user_error(
            "data",
            found=answer,
            expected="an answer that ends in '#### ' and an integer",
            remedy="Correct the data, or set data.reward=math.",
        )
    return final_integer(text) == gold


def final_integer(text: str) -> int | None:
    """The integer between the last `####` and the very end of `text`; at most one space before it, none after."""
    _, marker, tail = text.rpartition("####")
    tail = tail.removeprefix(" ")
    if not marker or not INTEGER.fullmatch(tail):
        return None
    return int(tail.replace(",", ""))


def math_reward(text: str, answer: str) -> bool:
    """Whether math-verify finds the last expression of `text` equal to the final answer (after `####`, if present).

    An answer that takes longer than ANSWER_SECONDS, or that breaks math-verify, is wrong. May be called in any thread.

    Raises:
        UserError: `answer` holds no expression that math-verify can read.
    """
    gold = final_integer(answer)
    if gold is not None and final_integer(text) == gold:
        return True  # the common case, without a round trip to the other process
    _, marker, tail = answer.rpartition("####")
    status = _math_verify.ask(text, tail.strip() if marker else answer)
    if status == "unreadable":
        raise user_error(
            "data",
            found=answer,
            expected="an answer with an expression that math-verify can read",
            remedy="Correct the data: end the answer in '#### ' and the result.",
        )
    return status == "equal"


class _MathVerifyProcess:
    """A child process that runs math-verify.

    math-verify interrupts itself by SIGALRM, which works in a main thread only and never inside one long C call, so
    the answers are compared in a process that can be ended from outside. It exits when this process does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, text: str, gold: str) -> str:
        """`equal`, `different`, `unreadable` (the gold answer) or `failed`."""
        with self._lock:
            if self._process is None:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps([text, gold]).encode() + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                self._stop()
                return "failed"
            reply = self._reply(ANSWER_SECONDS)
            if reply is None:
                self._stop()
            return reply or "failed"

    def _start(self) -> None:
        # -P keeps this folder off sys.path, where types.py would hide the standard library's module.
        command = [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        atexit.register(self.close)
        if self._reply(START_SECONDS) != "ready":
            self._stop()
            raise RuntimeError(f"{' '.join(command)} did not start; run it to see why (is math-verify installed?)")

    def _reply(self, seconds: float) -> str | None:
        """One line of the child; None if it stays silent for `seconds` or has ended."""
        assert self._process is not None and self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        return self._process.stdout.readline().decode().strip() or None if ready else None

    def _stop(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            # The pipes may hold an unsent question: drop it.
            for pipe in (process.stdin, process.stdout):
                try:
                    pipe.close()  # type: ignore[union-attr]
                except BrokenPipeError:
                    pass
            process.wait()
            atexit.unregister(self.close)

    def close(self) -> None:
        """End the child; a later question starts another."""
        with self._lock:
            self._stop()


_math_verify = _MathVerifyProcess()


def _has_a_result(answer: str) -> bool:
    """Of nearly anything but blanks math-verify makes an expression or a text to compare."""
    return bool(answer.rpartition("####")[2].strip("$ \t\r\n"))


@dataclass(frozen=True)
class Reward:
    """A way to judge an answer.

    judge: whether an answer's text solves the problem of this reference answer. reads: whether it can use a reference.
    reference: what one must be, in words.
    """

    judge: Callable[[str, str], bool]
    reads: Callable[[str], bool]
    reference: str


RewardKind = Literal["integer", "math"]
REWARDS: dict[RewardKind, Reward] = {
    "integer": Reward(
        integer_reward, lambda answer: final_integer(answer) is not None, "text that ends in '#### ' and an integer"
    ),
    "math": Reward(math_reward, _has_a_result, "a result after '####' that math-verify can read"),
}
