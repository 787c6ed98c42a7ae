"""A Python interpreter that the model may use: code between fences is run, and its output told."""

from __future__ import annotations

from fp8rl.rollout.environments.conversation import Conversation
from fp8rl.rollout.environments.sandbox import run_python

FENCE, LANGUAGE = "```", "python"


async def python(
    conversation: Conversation, calls: int = 4, timeout_s: float = 5.0, memory_mib: int = 512, role: str = "user"
) -> dict[str, float]:
    """The model writes a block of code, ```` ```python ... ``` ````, and ends its turn; what the block prints comes
    back as a message. A turn without such a block is the answer.

    calls: after so many, code is not run any more. timeout_s, memory_mib: of one call. role: of the message, `tool` for
    models whose chat template has it. Returns `calls`, and `errors`, those of them that did not end well.
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
    """The code of the last whole block of Python; None without one."""
    before, fence, _ = text.rpartition(FENCE)
    _, opened, code = before.rpartition(FENCE + LANGUAGE)
    return code.strip("\n") if fence and opened else None
