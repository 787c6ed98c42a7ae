"""A conversation between the model and an environment. It is a row of tokens that can only grow.

Only `sample` adds tokens of the model, with the engine's log-probabilities and versions. `tell` and `message` tokenize
a text, and add its tokens as the environment's. No text is tokenized twice. So the trainer scores exactly the sampled
tokens, and the engine finds each prefix in its cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, pairwise
from typing import TYPE_CHECKING, Any, Literal

from fp8rl.numerics.sampling import branch_seed
from fp8rl.rollout.deadlines import end, result_of
from fp8rl.rollout.tasks.chat import continuation_ids, prompt_ids
from fp8rl.rollout.tasks.environments.branch import Branch, ConversationOverError
from fp8rl.rollout.tasks.tokens import behind_ids, text_of
from fp8rl.rollout.types import Group, Prompt, SamplingParams, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fp8rl.rollout.types import Problem

Sampler = Callable[[Group, SamplingParams], Awaitable[Trajectory]]
"""Samples one answer to a prompt."""


@dataclass(frozen=True)
class Turn:
    """One turn of the model."""

    text: str
    """The text without the token that ended it."""
    token_ids: tuple[int, ...]
    """The tokens."""
    ended_by: str | None
    """The text of the last token: one of `sample`'s stops, or the end of turn. None: the length ended the turn."""


@dataclass
class _Talk:
    """The messages before and after the model's last turn. The chat template needs them to continue the turn."""

    history: list[Mapping[str, Any]]
    """The messages before the turn."""
    begin: int = 0
    """The index of the turn's first token in the row."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    """The messages after the turn, whose tokens begin at `end`."""
    end: int = 0
    truncated: bool = False
    """Whether the length ended the turn."""

    def go_on(self, length: int) -> None:
        """If messages follow the last turn, begin the model's next turn. length: number of tokens of the row now."""
        if self.messages:
            turn = [{"role": "assistant", "content": ""}] if self.end or self.begin else []
            self.history += [*turn, *self.messages]
            self.begin, self.messages = length, []


class Conversation:
    """One answer while it is sampled. An environment controls the conversation by these methods.

    problem: the question, with which the conversation begins, and the reference answer. sampling: the sampling
    parameters. tokenizer: the tokenizer of all texts.
    """

    def __init__(
        self,
        prompt: Prompt,
        seed: int,
        sampling: SamplingParams,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        timeout_s: float,
        longest: int | None = None,
    ) -> None:
        """seed: the seed of all draws. A draw also depends on its position. sampling: `max_new_tokens` limits all
        tokens after the prompt. timeout_s: the longest time between two turns of the model. longest: the largest number
        of tokens of a row. None: the length of the prompt plus `max_new_tokens`."""
        self.problem: Problem = prompt.problem
        self.sampling, self._sampler = sampling, sampler
        self.tokenizer, self._timeout_s, self._longest = tokenizer, timeout_s, longest
        self._scope = asyncio.timeout(timeout_s)
        self._main = Branch(prompt.token_ids, seed, sampling.max_new_tokens)
        self._talk = _Talk([*self.problem.conversation])
        self._branches: list[Branch] = []
        self._last: Branch = self._main
        self._under_way = 0
        self._lost: BaseException | None = None
        self._ended = False

    @property
    def room(self) -> int:
        """Number of tokens that are left, for the model and the environment together."""
        return self._main.remaining

    @property
    def turns(self) -> int:
        """The number of the model's turns."""
        return self._main.turns + sum(branch.turns for branch in self._branches)

    def begin(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Replace the problem's own messages by the environment's first messages.

        Raises:
            ValueError: the conversation already has tokens.
            ConversationOverError: the messages leave no room for an answer.
        """
        if self._main.tokens:
            raise ValueError("found begin() in a conversation with tokens, expected it before sample() and tell()")
        ids = prompt_ids(self.tokenizer, messages, self.problem.chat_template)
        self._talk = _Talk([*messages])
        self._open(ids)

    async def sample(self, stop: str | Sequence[str] = (), max_new_tokens: int | None = None) -> Turn:
        """Sample the model's next turn.

        The turn ends with the end of turn, with one of the `stop` texts, or after `max_new_tokens`. Each stop text is
        one token of the vocabulary. The token stays part of the conversation.

        Raises:
            ConversationOverError: no room is left.
            ValueError: a stop is not one token, or `max_new_tokens` is below 1.
        """
        if max_new_tokens is not None and max_new_tokens < 1:  # the engine's refusal would end the run
            raise ValueError(f"max_new_tokens: found {max_new_tokens}, expected 1 or more")
        stops: list[int] = []
        for text in [stop] if isinstance(stop, str) else stop:
            ids = behind_ids(self.tokenizer, text)
            if len(ids) != 1:
                raise ValueError(f"stop: found {text!r}, which is {len(ids)} tokens, expected one. Choose another text")
            stops += set(ids) - set(self.sampling.stop_token_ids)  # these end the answer, too
        self._talk.go_on(begin := len(self._main.tokens))
        turn = await self.ask(self._main, tuple(stops), max_new_tokens)
        self._main.append_turn(turn, stops=tuple(stops))
        self._talk.truncated = not turn.finished
        before_end = turn.token_ids[:-1] if turn.finished else turn.token_ids
        ended_by = text_of(self.tokenizer, turn.token_ids[-1:]) if turn.finished else None
        text = text_of(self.tokenizer, before_end, first=begin == self._talk.begin)
        return Turn(text, tuple(turn.token_ids), ended_by)

    def tell(self, text: str) -> None:
        """Append a text. Raises ConversationOverError: there is no room for the text."""
        self._talk.go_on(len(self._main.tokens))
        self._main.append_environment(behind_ids(self.tokenizer, text, self._main.ids))
        self._talk.truncated = False

    def message(self, role: str, content: str, **further: Any) -> None:
        """Append a message in the form of the chat template, up to the beginning of the model's next turn.

        The template writes consecutive messages together. Messages before the model's first turn become part of the
        prompt. further: other keys that the template reads, such as `name`.

        Raises:
            ConversationOverError: there is no room for the message.
            UserError: the chat template cannot continue the conversation.
        """
        talk, tokens, options = self._talk, self._main.tokens, self.problem.chat_template
        if not talk.messages:
            talk.end = len(tokens)
        talk.messages.append({"role": role, "content": content, **further})
        if talk.end == talk.begin == 0:
            return self._open(prompt_ids(self.tokenizer, [*talk.history, *talk.messages], options))
        turn = tokens[talk.begin : talk.end]
        ids = continuation_ids(self.tokenizer, talk.history, turn, talk.messages, options, truncated=talk.truncated)
        self._main.append_environment(ids, at=talk.end)

    def branch(self, prompt_ids: list[int]) -> Branch:
        """Open another row. Its seed depends on its prompt, not on the time at which it is opened.

        Raises ConversationOverError: the prompt leaves no room for an answer.
        """
        same = sum(branch.prompt_ids == prompt_ids for branch in self._branches)
        branch = Branch(prompt_ids, branch_seed(self._main.seed, prompt_ids, same), self._limit(prompt_ids))
        if branch.remaining < 1:
            raise ConversationOverError
        self._branches.append(branch)
        return branch

    async def ask(self, branch: Branch, stops: tuple[int, ...] = (), max_new_tokens: int | None = None) -> Trajectory:
        """Sample the engine's continuation of a branch, for `Branch.append_turn`.

        stops: tokens that end the continuation, like the end of turn.

        Raises ConversationOverError: no room is left, or the environment has ended, perhaps during the sampling.
        """
        if self._ended:
            raise ConversationOverError
        if branch.truncated or branch.remaining < 1:
            branch.truncated = True
            raise ConversationOverError
        count = branch.remaining if max_new_tokens is None else min(max_new_tokens, branch.remaining)
        sampling = replace(self.sampling, max_new_tokens=count, stop_token_ids=(*self.sampling.stop_token_ids, *stops))
        self._under_way += 1
        self._give(None)  # the engine's time is not the environment's
        try:
            turn = await self._sampler(Group(Prompt(self.problem, branch.ids), (branch.seed,)), sampling)
        except Exception as error:
            self._lost = error  # an environment that catches everything must not hide it
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._give(self._timeout_s)
        if self._ended:  # its rows are taken as they are
            raise ConversationOverError
        self._last = branch
        return turn

    async def run(self, environment: Callable[[Conversation], Awaitable[object]]) -> object:
        """Let an environment control the conversation until it ends. Return its result. None: no room was left.

        Raises:
            TimeoutError: the environment took too long between two turns.
            Exception: any error of the environment or the engine.
        """
        returned: object = None
        running = asyncio.ensure_future(environment(self))
        try:
            async with self._scope:
                await asyncio.wait({running})
            returned = result_of(running)
        except ConversationOverError:
            pass
        except Exception:
            if self._lost is None:
                raise
        finally:
            await end(running)
            self._ended = True
        if self._lost is not None:
            raise self._lost
        return returned

    def trajectories(self, outcome: dict[str, float], *, failed: bool = False) -> list[Trajectory]:
        """Return every row in which the model has a turn, and at least one row.

        The row with the model's last turn comes first. The order of the other rows does not depend on time.
        """
        spoken = [branch for branch in (self._main, *self._branches) if branch.turns]
        others = sorted(spoken, key=lambda branch: (branch is not self._last, branch.prompt_ids, branch.seed))
        rows = enumerate(others or [self._main])
        return [branch.trajectory(outcome, failed=failed, number=number) for number, branch in rows]

    def _open(self, ids: list[int]) -> None:
        self._main.prompt_ids, self._main.limit = ids, self._limit(ids)
        if self._main.limit < 1:
            raise ConversationOverError

    def _limit(self, begun: list[int]) -> int:
        limit = self.sampling.max_new_tokens
        return limit if self._longest is None else min(limit, self._longest - len(begun))

    def _give(self, seconds: float | None) -> None:
        """Give the environment `seconds` from now on. None: no deadline."""
        with suppress(RuntimeError):  # what a program has asked for, and ended without
            self._scope.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)


# A trajectory as text: who said what.

Said = tuple[Literal["model", "environment"], str]


def transcript(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[Said]:
    """Return each turn after the prompt, in order. The end of turn that ends the answer is left out."""
    ids = trajectory.token_ids[:-1] if trajectory.finished and trajectory.stopped else trajectory.token_ids
    ends = [0, *chain.from_iterable(trajectory.environment_spans), len(ids)]
    texts = [text_of(tokenizer, ids[begin:end], first=begin == 0) for begin, end in pairwise(ends)]
    return list(zip(cycle(("model", "environment")), texts))
