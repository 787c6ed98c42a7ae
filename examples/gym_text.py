"""An environment of Gymnasium as a conversation: it writes what is seen, and a number of the model's is the action."""

import gymnasium
import numpy

from fp8rl import Conversation


async def play(conversation: Conversation, name: str, steps: int = 16) -> dict[str, float]:
    game, total = gymnasium.make(name), 0.0
    seen, _ = game.reset(seed=conversation.problem.fields["seed"])
    conversation.begin([{"role": "user", "content": written(seen)}])
    for step in range(1, steps + 1):
        said = (await conversation.sample()).text
        if not said.isdigit() or not game.action_space.contains(int(said)):
            return {"reward": total - 1.0, "steps": step, "unread": 1.0}
        seen, reward, ended, cut, _ = game.step(int(said))
        total += float(reward)
        if ended or cut:
            break
        conversation.message("user", written(seen))
    return {"reward": total, "steps": step, "unread": 0.0}


def written(seen: object) -> str:
    return ",".join(str(int(value)) for value in numpy.ravel(seen))
