"""A question and its answer: the environment of a run that names none."""

from fp8rl.rollout.environments.conversation import Conversation


async def single_turn(conversation: Conversation) -> None:
    """Let the model answer."""
    await conversation.sample()
