"""A calculator in the middle of an answer: what the model writes between `(` and `=` is worked out for it."""

import re
from operator import add, mul, sub

from fp8rl.rollout.environments.conversation import Conversation

OPEN, CALL, CLOSE = "(", "=", ")"
_SUM = re.compile(r"(-?\d{1,9})([-+*])(-?\d{1,9})")
_WORK_OUT = {"+": add, "-": sub, "*": mul}


async def calculator(conversation: Conversation, calls: int = 16) -> dict[str, float]:
    """The model writes `(9+4=`, the calculator goes on with `13)`, and `?)` where it cannot read a sum, a difference or
    a product of two integers.

    calls: after so many, `=` calls nobody. Returns `calls`, and `unread`, those of them that it could not read.
    """
    said, counts = "", {"calls": 0.0, "unread": 0.0}
    while counts["calls"] < calls:
        turn = await conversation.sample(stop=[CALL])
        said += turn.text
        if turn.ended_by != CALL:
            return counts
        result = worked_out(said.rpartition(OPEN)[2])
        counts["calls"] += 1
        counts["unread"] += result is None
        conversation.tell(f"{'?' if result is None else result}{CLOSE}")
    await conversation.sample()
    return counts


def worked_out(text: str) -> int | None:
    """The value of two integers with a sign between them; None of anything else."""
    match = _SUM.fullmatch(text.replace(" ", ""))
    return None if match is None else int(_WORK_OUT[match[2]](int(match[1]), int(match[3])))
