"""An environment in which the model runs Python, in a process that has no network, little memory and little time.

It is meant for code that goes wrong, not for an attacker: it can read what the user of the run can read.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fp8rl import Conversation
from fp8rl.rollout.deadlines import end_process
from fp8rl.rollout.tasks.environments import supervisor

LIMITS = Path(__file__).with_name("limited.py")
LONGEST_OUTPUT = 4096
"""Characters of its output that are kept."""
FENCE, LANGUAGE = "```", "python"


async def python(
    conversation: Conversation, calls: int = 4, timeout_s: float = 5.0, memory_mib: int = 512, role: str = "user"
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


@dataclass(frozen=True)
class Ran:
    """The result of code."""

    text: str
    """Its output, and the reason for its end."""
    ok: bool
    """It ended by itself, without an error."""


async def run_python(code: str, *, timeout_s: float = 5.0, memory_mib: int = 512) -> Ran:
    """Run code in a process of its own, in an empty folder, and end it with all that it has started."""
    with tempfile.TemporaryDirectory(prefix="fp8rl-python-") as folder:
        Path(folder, "answer.py").write_text(code, encoding="utf-8", errors="replace")
        limits = [str(memory_mib * 2**20), str(math.ceil(timeout_s) + 1)]
        process = await asyncio.create_subprocess_exec(
            *supervisor.COMMAND,
            *(sys.executable, "-I", "-S", str(LIMITS), *limits, "answer.py"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env={"HOME": folder, "LANG": "C.UTF-8"},
        )
        printed = bytearray()
        try:
            async with asyncio.timeout(timeout_s):
                while piece := await process.stdout.read(1 << 16):  # type: ignore[union-attr]
                    printed += piece[: LONGEST_OUTPUT - len(printed)]
                status, reason = await process.wait(), ""
        except TimeoutError:
            status, reason = 1, f"\nit took more than {timeout_s:g} s"
        finally:
            await end_process(process)  # which ends what it has started
    if status > 128:
        reason = f"\nit was ended by signal {status - 128}"
    return Ran(printed.decode(errors="replace") + reason, status == 0)
