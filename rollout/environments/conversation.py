"""A conversation between the model and an environment, in tokens, which can only grow.

The model's tokens get into it by `sample` alone, with the log-probabilities and versions that the engine gave them; the
environment's by `tell` and `message`, where a text is tokenized, once. What is there is never tokenized again, so that
the trainer scores exactly what was sampled, and the engine finds each prefix in its cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from numerics.errors import UserError
from rollout.types import Group, Prompt, SamplingParams, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollout.data.tasks import Problem

Sampler = Callable[[Group, SamplingParams], Awaitable[Trajectory]]
"""One answer to a prompt."""


class ConversationOverError(Exception):
    """An answer has used up its tokens; an environment need not catch it."""


@dataclass(frozen=True)
class Turn:
    """What the model said in one go.

    text: without the token that ended it. ended_by: the text of that token, a stop of the environment's or the model's
    end of turn; None if its length did.
    """

    text: str
    token_ids: tuple[int, ...]
    ended_by: str | None


class Conversation:
    """One answer while it comes about. An environment gets it, and says what happens.

    Attributes:
        problem: the question that it began with, and the data's answer to it.
    """

    def __init__(
        self,
        prompt: Prompt,
        seed: int,
        sampling: SamplingParams,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        timeout_s: float,
    ) -> None:
        """seed: of all its draws, as each goes by the position too. sampling: `max_new_tokens` bounds everything after
        the prompt. timeout_s: between two turns of the model."""
        self.problem: Problem = prompt.problem
        self._prompt, self._seed, self._sampling, self._sampler = prompt, seed, sampling, sampler
        self._tokenizer, self._timeout_s = tokenizer, timeout_s
        self._scope = asyncio.timeout(timeout_s)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._weight_versions: list[int] = []
        self._told: list[tuple[int, int]] = []
        self._routes: Tensor | None = None
        self._turns = 0
        self._cut = self._stopped = False
        self._lost: BaseException | None = None

    @property
    def room(self) -> int:
        """Tokens that are left, for the model and the environment together."""
        return self._sampling.max_new_tokens - len(self._tokens)

    @property
    def turns(self) -> int:
        """How many the model had."""
        return self._turns

    async def sample(self, stop: Sequence[str] = (), max_new_tokens: int | None = None) -> Turn:
        """The model's next turn: up to its end of turn, one of the `stop` texts (each one token of the vocabulary,
        which stays part of the conversation), or `max_new_tokens`.

        Raises:
            ConversationOverError: no room is left.
            ValueError: a stop is not one token.
        """
        if self._cut or self.room < 1:
            self._cut = True
            raise ConversationOverError
        stops = tuple(self._one_token(text) for text in stop)
        count = self.room if max_new_tokens is None else min(max_new_tokens, self.room)
        sampling = replace(
            self._sampling, max_new_tokens=count, stop_token_ids=(*self._sampling.stop_token_ids, *stops)
        )
        prompt = Prompt(self.problem, self._prompt.token_ids + self._tokens)
        self._scope.reschedule(None)  # the engine's time is not the environment's
        try:
            said = await self._sampler(Group(prompt, (self._seed,)), sampling)
        except Exception as error:
            self._lost = error  # an environment that catches everything must not hide it
            raise
        self._scope.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
        self._tokens += said.token_ids
        self._logprobs += said.logprobs
        self._weight_versions += said.weight_versions
        self._routes = said.routed_experts
        self._turns += 1
        self._stopped = said.finished and said.token_ids[-1] not in stops
        self._cut = not said.finished and self.room < 1
        text = said.token_ids[:-1] if said.finished else said.token_ids
        ended_by = self._tokenizer.decode(said.token_ids[-1:]) if said.finished else None
        return Turn(self._tokenizer.decode(text), tuple(said.token_ids), ended_by)

    def tell(self, text: str) -> None:
        """Put the environment's words after what is there. Raises ConversationOverError: there is no room for them."""
        self._tell(self._tokenizer(text, add_special_tokens=False).input_ids)

    def message(self, role: str, content: str) -> None:
        """Put a message there as the chat template writes one after the model's turn, up to where the model's next
        begins. Raises ConversationOverError: there is no room for it."""
        self._tell(message_ids(self._tokenizer, role, content))

    async def run(self, environment: Callable[[Conversation], Awaitable[object]]) -> object:
        """Let an environment own it from its beginning to its end; what it returned, None if room ran out.

        Raises:
            TimeoutError: it took too long between two turns.
            Exception: whatever it, or the engine, raises.
        """
        returned: object = None
        try:
            async with self._scope:
                returned = await environment(self)
        except ConversationOverError:
            pass
        except Exception:
            if self._lost is not None:
                raise self._lost from None
            raise
        if self._lost is not None:
            raise self._lost
        return returned

    def trajectory(self, outcome: dict[str, float], *, failed: bool = False) -> Trajectory:
        """What has become of it. What the environment said last, and nobody answered, is left out."""
        length = len(self._tokens)
        told = list(self._told)
        if told and told[-1][1] == length:
            length = told.pop()[0]
        return Trajectory(
            prompt_ids=self._prompt.token_ids,
            token_ids=self._tokens[:length],
            logprobs=self._logprobs,
            finished=not self._cut,
            stopped=self._stopped,
            weight_versions=self._weight_versions,
            group=0,
            seed=self._seed,
            routed_experts=self._routes,
            told=tuple(told),
            outcome=outcome,
            failed=failed,
        )

    def _tell(self, ids: list[int]) -> None:
        if len(ids) >= self.room:  # with one token left there is nothing to answer with
            self._cut = True
            raise ConversationOverError
        begin = len(self._tokens)
        if self._told and self._told[-1][1] == begin:
            begin = self._told.pop()[0]
        self._tokens += ids
        self._told.append((begin, len(self._tokens)))

    def _one_token(self, text: str) -> int:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) != 1:
            raise ValueError(f"stop: found {text!r}, which is {len(ids)} tokens, expected one; choose another text")
        return ids[0]


def message_ids(tokenizer: PreTrainedTokenizerBase, role: str, content: str) -> list[int]:
    """The tokens between the model's end of turn and its next turn, with a message between them.

    Raises UserError: the chat template does not continue a conversation where it left off, so that no tokens do.
    """
    before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    options = {"tokenize": False, "add_generation_prompt": True}
    begun = tokenizer.apply_chat_template(before, tokenize=False)
    whole = tokenizer.apply_chat_template([*before, {"role": role, "content": content}], **options)
    end = begun.rfind(tokenizer.eos_token) + len(tokenizer.eos_token)
    if tokenizer.eos_token not in begun or not whole.startswith(begun[:end]):
        raise UserError(
            f"environment: found a chat template that writes a conversation anew when a {role} message follows, "
            "expected one that goes on after the end of turn. Have the environment use tell() with the text itself."
        )
    ids: list[int] = tokenizer(whole[end:], add_special_tokens=False).input_ids
    return ids
