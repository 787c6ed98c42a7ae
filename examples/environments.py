"""Environments of arithmetic.yaml's model: `guess`, a game of several turns, and `calculator`, a tool in an answer."""

from __future__ import annotations

import re
from operator import add, mul, sub

from fp8rl import Conversation

HIGHER, LOWER, UNREAD = ">,", "<,", "?,"


async def guess(conversation: Conversation, tries: int = 3, tokens: int = 1) -> dict[str, float]:
    """Hide the data's answer, a number, and answer each guess with `>,` if it is higher, `<,` if lower, `?,` if unread.

    A guess is a turn of at most `tokens` tokens. Returns `reward` (1 if the number was found), and `guesses`, the
    number of turns.
    """
    hidden = int(conversation.problem.answer.rpartition("####")[2])
    for count in range(1, tries + 1):
        text = (await conversation.sample(max_new_tokens=tokens)).text
        try:
            guessed = int(text)
        except ValueError:
            guessed = None
        if guessed == hidden:
            return {"reward": 1.0, "guesses": count}
        if count < tries:
            conversation.tell(UNREAD if guessed is None else HIGHER if hidden > guessed else LOWER)
    return {"reward": 0.0, "guesses": tries}


OPEN, CALL, CLOSE = "(", "=", ")"
_SUM = re.compile(r"(-?\d{1,9})([-+*])(-?\d{1,9})")
_WORK_OUT = {"+": add, "-": sub, "*": mul}


async def calculator(conversation: Conversation, calls: int = 16) -> dict[str, float]:
    """Continue the model's `(9+4=` with `13)`, and with `?)` if it is no sum, difference or product of two integers.

    calls: the most calculations; a further `=` calls nobody. Returns `calls`, and `unread`, the calls that it could not
    read.
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
    """Return the value of two integers with a sign between them; None of anything else."""
    match = _SUM.fullmatch(text.replace(" ", ""))
    return None if match is None else int(_WORK_OUT[match[2]](int(match[1]), int(match[3])))
