"""The main module of a process that calls plain reward functions; see `rollout.rewards.workers`.

Its first line of standard input is a JSON list of `RewardSection`. Each further line is `[index of a function, offered,
answers]`; each is answered by a line of standard output: `{"parts": ...}` or `{"error": traceback}`. What a function
prints, or reads, goes nowhere.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from typing import Any

from fp8rl.rollout.rewards.config import RewardSection
from fp8rl.rollout.rewards.functions import load_function

MEMORY_LIMIT = 4 * 2**30
"""Bytes of data that a worker may take: 9^9^9^9 must fail here, not exhaust the machine."""


def main() -> None:
    # Even within a regular expression that would go on for years, where no thread of this process gets a turn.
    kill_at_parents_death = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None, use_errno=True).prctl(kill_at_parents_death, signal.SIGKILL)
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    own = os.getpid()
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
        if os.getpid() != own:
            os._exit(0)  # a child that the function has forked and that came back here
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    main()
