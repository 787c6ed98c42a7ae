"""An environment of one's own: who answers wrong hears the question once more, and can still earn half a point."""

from fp8rl import Conversation


async def second_chance(conversation: Conversation) -> dict[str, float]:
    result = "#### " + conversation.problem.answer.rpartition("####")[2].strip()
    turn = await conversation.sample()
    if turn.text.endswith(result):
        return {"reward": 1.0, "turns": 1}
    conversation.message("user", conversation.problem.question)
    turn = await conversation.sample()
    return {"reward": 0.5 * turn.text.endswith(result), "turns": 2}
