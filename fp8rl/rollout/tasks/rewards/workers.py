"""Calls plain reward functions in a pool of processes. A call that hangs is killed, with all that it has started."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from fp8rl.rollout.tasks.environments.supervisor import DEATH_SIGNAL, prctl
from fp8rl.rollout.tasks.named_functions import Numbers
from fp8rl.rollout.tasks.rewards import RewardSection, load_function

MEMORY_LIMIT = 4 * 2**30
"""Bytes of data that a worker may allocate. 9^9^9^9 must fail in the worker, and not exhaust the machine."""
START_SECONDS = 120.0
"""Seconds that a process may take to start, enough to import sympy on a busy machine with cold caches."""


class RewardFailure(Exception):
    """A call returned no reward. The message is its traceback, or says what happened."""


class Workers:
    """A pool of processes, each of which calls one function at a time. They end with this process, or at `close`."""

    def __init__(self, configs: Sequence[RewardSection], count: int) -> None:
        self.threads = ThreadPoolExecutor(count, thread_name_prefix="reward")
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._all = [_Worker(configs) for _ in range(count)]
        for worker in self._all:
            self._idle.put(worker)

    def call(self, index: int, offered: Mapping[str, Any], answers: int, timeout_s: float) -> list[Numbers]:
        """Call function number `index` for `answers` answers. Use a thread of `threads`. Raises RewardFailure."""
        worker = self._idle.get()
        try:
            return worker.call(index, offered, answers, timeout_s)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill the processes. Unfinished calls fail."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._all:
            worker.stop()


class _Worker:
    """One process. It starts when it is first needed, and again after it was killed."""

    def __init__(self, configs: Sequence[RewardSection]) -> None:
        self._configs = [config.model_dump() for config in configs]
        self._process: subprocess.Popen[str] | None = None

    def call(self, index: int, offered: Mapping[str, Any], answers: int, timeout_s: float) -> list[Numbers]:
        process = self._process or self._started()
        reply = _asked(process, [index, offered, answers], timeout_s)
        if "parts" in reply:
            parts: list[Numbers] = reply["parts"]
            return parts
        if "error" in reply:
            raise RewardFailure(reply["error"])
        self.stop()
        raise RewardFailure("it ended its process" if "ended" in reply else f"it took more than {timeout_s:g} s")

    def _started(self) -> subprocess.Popen[str]:
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fp8rl.rollout.tasks.rewards.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if "ready" not in _asked(process, self._configs, START_SECONDS):
            self.stop()
            raise RewardFailure("the process for rewards did not start. `fp8rl train` shows why on standard error")
        return process

    def stop(self) -> None:
        """Kill the process and its children, if there are any."""
        if self._process is None:
            return
        process, self._process = self._process, None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
        with suppress(BrokenPipeError):  # an unsent question
            process.stdin.close()  # type: ignore[union-attr]


def _asked(process: subprocess.Popen[str], question: Any, seconds: float) -> dict[str, Any]:
    """Send a request and return the reply. `{}`: there was none in time. `{"ended": True}`: the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return {"ended": True}
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    if not ready:
        return {}
    line = process.stdout.readline()
    reply: dict[str, Any] = json.loads(line) if line else {"ended": True}
    return reply


def main() -> None:
    """Call plain reward functions, in a process of the pool.

    The first line of standard input is a JSON list of `RewardSection`. Each later line is a call, `[index of a
    function, offered, answers]`. The answer is a line of standard output, `{"parts": ...}` or `{"error": traceback}`. A
    function's own input and output are /dev/null.
    """
    # Even within a regular expression that would go on for years, where no thread of this process gets a turn.
    prctl(DEATH_SIGNAL, signal.SIGKILL)
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    worker = os.getpid()
    configs = [RewardSection(**values) for values in json.loads(requests.readline())]
    functions = [load_function(config, f"rewards.functions.{index}") for index, config in enumerate(configs)]
    for function in functions:
        getattr(sys.modules[function.call.__module__], "prepare", lambda: None)()
    print(json.dumps({"ready": True}), file=replies)
    for line in requests:
        index, offered, answers = json.loads(line)
        function = functions[index]
        try:
            reply: dict[str, Any] = {"parts": function.parts(function(offered), answers)}
        except BaseException:  # a function may raise anything, SystemExit included
            reply = {"error": traceback.format_exc()}
        if os.getpid() != worker:
            os._exit(0)  # a child that the function has forked and that came back here
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    main()
