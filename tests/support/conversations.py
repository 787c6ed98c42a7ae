"""A model whose lines are given, and the conversation that it has with an environment."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fp8rl.rollout.tasks.chat import end_ids
from fp8rl.rollout.tasks.environments.conversation import Conversation
from fp8rl.rollout.types import Group, Problem, Prompt, SamplingParams, Trajectory

EOS = "<|im_end|>"


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return found


class Model:
    """Says its lines one after the other, each up to where the engine would end it; `asked` keeps what it was asked."""

    def __init__(self, tokenizer: Any, *lines: str) -> None:
        self.tokenizer, self.lines = tokenizer, list(lines)
        self.asked: list[tuple[list[int], int, SamplingParams]] = []

    async def __call__(self, group: Group, sampling: SamplingParams) -> Trajectory:
        (seed,) = group.seeds
        self.asked.append((group.prompt.token_ids, seed, sampling))
        await asyncio.sleep(0)
        said, finished = [], False
        for token in ids(self.tokenizer, self.lines.pop(0))[: sampling.max_new_tokens]:
            said.append(token)
            finished = token in sampling.stop_token_ids
            if finished:
                break
        version = len(self.asked)
        logprobs = [-float(token) for token in said]
        return Trajectory(group.prompt.token_ids, said, logprobs, finished, [version] * len(said), 0, seed)


@dataclass
class Stage:
    """Lets an environment talk to a model; `model` is the one of the last conversation."""

    tokenizer: Any
    model: Model | None = None

    def __call__(
        self,
        environment: Callable[[Conversation], Awaitable[Any]],
        *lines: str,
        question: str = "1+2=?",
        answer: str = "#### 3",
        max_new_tokens: int = 64,
        fields: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """The trajectory of a conversation with these lines of the model."""
        self.model = Model(self.tokenizer, *lines)
        prompt = Prompt(Problem(question, answer, fields=fields or {}), ids(self.tokenizer, question))
        return rows_of(self.tokenizer, environment, self.model, prompt, max_new_tokens)[0]


def rows_of(
    tokenizer: Any, environment: Any, model: Any, prompt: Prompt, max_new_tokens: int, longest: int | None = None
) -> list[Trajectory]:
    """What is recorded of a conversation with a model."""
    sampling = SamplingParams(max_new_tokens, stop_token_ids=end_ids(tokenizer))

    async def run() -> list[Trajectory]:
        conversation = Conversation(prompt, 7, sampling, model, tokenizer, timeout_s=60.0, longest=longest)
        outcome: Any = await conversation.run(environment)
        return conversation.trajectories(outcome)

    return asyncio.run(run())
