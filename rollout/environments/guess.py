"""A number to be guessed: the data's answer is hidden, and after each guess the model hears which way it is."""

from fp8rl.rollout.environments.conversation import Conversation

HIGHER, LOWER, UNREAD = ">,", "<,", "?,"


async def guess(conversation: Conversation, tries: int = 3, tokens: int = 1) -> dict[str, float]:
    """A guess is a turn of at most `tokens` tokens; the environment answers `>,` where the hidden number is higher,
    `<,` where it is lower, and `?,` to what is no number.

    Returns `reward` (1 if the number was found), and `guesses`, the turns that it took.
    """
    hidden = int(conversation.problem.answer.rpartition("####")[2])
    for count in range(1, tries + 1):
        guessed = _number((await conversation.sample(max_new_tokens=tokens)).text)
        if guessed == hidden:
            return {"reward": 1.0, "guesses": count}
        if count < tries:
            conversation.tell(UNREAD if guessed is None else HIGHER if hidden > guessed else LOWER)
    return {"reward": 0.0, "guesses": tries}


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
