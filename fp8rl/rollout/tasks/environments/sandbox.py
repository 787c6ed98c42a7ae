"""The environment `python`: runs a model's code in a process that has no network, little memory and little time.

It is meant for code that goes wrong, not for an attacker: it can read what the user of the run can read.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from fp8rl.rollout.deadlines import end_process, within
from fp8rl.rollout.tasks.environments import supervisor
from fp8rl.rollout.tasks.environments.builtin import Count
from fp8rl.rollout.tasks.environments.conversation import Conversation

LONGEST_OUTPUT = 4096
"""Characters of its output that are kept."""
_START_SECONDS = 20.0
"""Seconds in which the interpreter starts on a busy machine."""


@dataclass(frozen=True)
class Ran:
    """The result of code."""

    text: str
    """Its output, or the reason for its absence."""
    ok: bool
    """It ended by itself, without an error."""


async def run_python(code: str, *, timeout_s: float = 5.0, memory_mib: int = 512) -> Ran:
    """Run code in a process of its own, in an empty folder, and end it with all that it has started.

    Raises RuntimeError: this machine cannot take the network away from a process.
    """
    request = json.dumps(
        {"code": code, "timeout_s": timeout_s, "memory": memory_mib * 2**20, "longest": LONGEST_OUTPUT}
    )
    with tempfile.TemporaryDirectory(prefix="fp8rl-python-") as folder:
        process = await asyncio.create_subprocess_exec(
            *supervisor.COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=folder,
        )
        try:
            reply, error = await within(timeout_s + _START_SECONDS, process.communicate(request.encode()))
        finally:
            await end_process(process)  # which ends what it has started
    if process.returncode:
        raise RuntimeError(f"the process for Python code has failed: {error.decode(errors='replace').strip()}")
    return Ran(**json.loads(reply))


FENCE, LANGUAGE = "```", "python"


async def python(
    conversation: Conversation,
    calls: Annotated[int, Field(ge=0)] = 4,
    timeout_s: Annotated[float, Field(gt=0.0)] = 5.0,
    memory_mib: Count = 512,
    role: Annotated[str, Field(min_length=1)] = "user",
) -> dict[str, float]:
    """Run the block of code, ```` ```python ... ``` ````, that ends the model's turn, and append its output as a
    message.

    A turn without such a block is the answer. calls: the most blocks that are run. timeout_s, memory_mib: of one call.
    role: of the message, `tool` for models whose chat template has it. Returns `calls`, and `errors`, those of them
    that did not end well.
    """
    counts = {"calls": 0.0, "errors": 0.0}
    while True:
        code = last_block((await conversation.sample()).text)
        if code is None or counts["calls"] == calls:
            return counts
        result = await run_python(code, timeout_s=timeout_s, memory_mib=memory_mib)
        counts["calls"] += 1
        counts["errors"] += not result.ok
        conversation.message(role, result.text)


def last_block(text: str) -> str | None:
    """Return the code of the last whole block of Python; None without one."""
    before, fence, _ = text.rpartition(FENCE)
    _, opened, code = before.rpartition(FENCE + LANGUAGE)
    return code.strip("\n") if fence and opened else None
