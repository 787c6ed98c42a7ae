"""The record of a conversation between a program and the model, as rows of tokens.

A request is looked up by its messages. If they continue the model's turns, the row goes on from the recorded tokens,
and only the text between the turns is tokenized, once. If they do not, a row of its own begins, with as many recorded
tokens as its history shares with the record.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import jinja2

from fp8rl.rollout.chat import RewritingTemplateError, continuation_ids, prompt_ids, read_arguments
from fp8rl.rollout.environments.branch import Branch, ConversationOverError
from fp8rl.rollout.environments.conversation import Conversation
from fp8rl.rollout.environments.harness.requests import Ask, RefusedError
from fp8rl.rollout.environments.harness.tools import parse_calls
from fp8rl.rollout.lengths import widest_token

_AT_ONCE = 1 << 16
"""Bytes of text that are tokenized where they come in: it takes less time than they took to arrive."""


@dataclass(frozen=True)
class RecordedTurn:
    """One turn of the model."""

    text: str
    """Without the token that ended it, and without its tool calls."""
    calls: tuple[dict[str, Any], ...]
    reason: str
    """The finish reason in OpenAI's words: stop, length or tool_calls."""
    prompt: int
    """Tokens before it."""
    tokens: int
    """Its own tokens."""
    number: int


@dataclass(frozen=True)
class _Point:
    """The end of a turn of the model: tokens `begin` to `length` of a branch."""

    branch: Branch
    begin: int
    length: int
    ended: bool
    """The last of them is the end of turn."""
    cut: bool
    """Its length has ended it."""


class Recording:
    """The turns of one conversation.

    most_bytes: of text, the most that may find room. over: a turn found no room, so that the program cannot go on as it
    wanted. lost: an engine's error ended it.
    """

    def __init__(self, conversation: Conversation, tool_parser: str | None, max_requests: int) -> None:
        self._conversation, self._tool_parser, self._left = conversation, tool_parser, max_requests
        self._most = max_requests
        self.most_bytes = conversation.longest * widest_token(conversation.tokenizer)
        self._tokenizing = asyncio.Lock()
        self._points: dict[bytes, _Point] = {}
        self._written: list[tuple[str, _Point]] = []
        self._busy: set[Branch] = set()
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.over, self.lost = False, asyncio.Event()

    async def answer(self, ask: Ask) -> RecordedTurn:
        """Sample the model's turn after a request.

        Raises RefusedError: there is no room for it, or nothing can be said there.
        """
        if not self._left:
            raise RefusedError(
                f"found more than {self._most} requests, expected a program that ends "
                "(environment.harness.max_requests)",
                status=429,
            )
        self._left -= 1
        try:
            branch = await self._begun(ask)
            point, text = await self._sampled(branch, ask)
        except ConversationOverError:
            raise self.no_room("messages" if ask.messages else "prompt") from None
        except RefusedError:
            raise
        except Exception:
            self.lost.set()
            raise
        return self._recorded(point, ask, text)

    def no_room(self, param: str) -> RefusedError:
        """Note that a turn found no room, and return the refusal of its request."""
        self.over = True
        message = "no room is left for an answer (rollout.max_new_tokens, rollout.context_length)"
        return RefusedError(message, param, code="context_length_exceeded")

    async def wait(self) -> None:
        """Wait until no request is under way: a request that the program has not waited for is recorded too."""
        async with self._tokenizing:  # whose request is under way, too
            pass
        await self._idle.wait()

    async def _begun(self, ask: Ask) -> Branch:
        """Return the branch that the next turn belongs to.

        A long text is tokenized in a thread, beside the conversations of others. A text that cannot fit is not
        tokenized at all.

        Raises ConversationOverError: there is no room for it.
        """
        if ask.size > self.most_bytes:
            raise ConversationOverError
        begin = self._chat if ask.messages else self._text
        async with self._tokenizing:
            return begin(ask) if ask.size <= _AT_ONCE else await asyncio.to_thread(begin, ask)

    def _recorded(self, point: _Point, ask: Ask, text: str) -> RecordedTurn:
        """Record a turn under the keys of the requests that may continue it."""
        calls: tuple[dict[str, Any], ...] = ()
        if ask.calls and self._tool_parser is not None:
            text, calls = parse_calls(text, ask.tools, self._tool_parser, self._calls)
            self._calls += len(calls)
        if ask.messages:
            spoken: dict[str, Any] = {"role": "assistant", "content": text}
            if calls:  # as they look when a program sends them back
                functions = [
                    {"name": call["function"]["name"], "arguments": read_arguments(call["function"]["arguments"])}
                    for call in calls
                ]
                spoken["tool_calls"] = [
                    {"id": call["id"], "type": "function", "function": function}
                    for call, function in zip(calls, functions, strict=True)
                ]
            self._points[_keys(ask, (*ask.messages, spoken))[-1]] = point
        else:
            before = ask.prompt if isinstance(ask.prompt, str) else self._conversation.tokenizer.decode(ask.prompt)
            self._written += [(before + shown, at) for shown, at in self._shown(point, text)]
        reason = "tool_calls" if calls else "length" if point.cut else "stop"
        return RecordedTurn(text, calls, reason, point.begin, point.length - point.begin, self._most - self._left)

    def _shown(self, point: _Point, text: str) -> Iterator[tuple[str, _Point]]:
        """Yield a completion as later prompts may begin with it: with the stop that ended it, or without, as sent."""
        decode, ids = self._conversation.tokenizer.decode, point.branch.ids[point.begin : point.length]
        yield decode(ids[:-1] if point.ended else ids), point
        for length in range(len(ids), 0, -1):
            if not point.ended and decode(ids[:length]) == text:
                yield text, replace(point, length=point.begin + length)

    async def _sampled(self, branch: Branch, ask: Ask) -> tuple[_Point, str]:
        """Sample a turn into the branch; return its end, and its text without the token that ended it."""
        tokenizer = self._conversation.tokenizer
        singles = {stop: tokenizer(stop, add_special_tokens=False).input_ids for stop in ask.stop}
        stops = tuple(ids[0] for ids in singles.values() if len(ids) == 1)
        self._busy.add(branch)
        self._idle.clear()
        try:
            said = await self._conversation.ask(branch, stops, ask.max_tokens)
            ids = said.token_ids
            text = tokenizer.decode(ids[:-1] if said.finished else ids)
            count = len(ids)
            if found := [at for stop in ask.stop if (at := text.find(stop)) >= 0]:
                # Up to the token that completes a stop of several.
                count = 1 + bisect_left(
                    range(1, len(ids) + 1),
                    True,
                    key=lambda n: any(stop in tokenizer.decode(ids[:n]) for stop in ask.stop),
                )
                text = text[: min(found)]
            begin, whole = len(branch.ids), count == len(ids)
            branch.add(said, length=count, stops=stops)
            ended = whole and said.finished and ids[-1] not in stops
            return _Point(branch, begin, begin + count, ended, cut=whole and not said.finished), text
        finally:
            self._busy.discard(branch)
            if not self._busy:
                self._idle.set()

    def _chat(self, ask: Ask) -> Branch:
        """Return the branch that a chat's next turn belongs to, with all that comes before it."""
        tokenizer, options = self._conversation.tokenizer, self._options(ask)
        keys = _keys(ask, ask.messages)
        try:
            for end in range(len(ask.messages), 0, -1):
                if (point := self._points.get(keys[end - 1])) is not None:
                    turn = point.branch.ids[point.begin : point.length]
                    calls = ask.messages[end - 1].get("tool_calls", ())
                    history, further = ask.messages[: end - 1], ask.messages[end:]
                    with suppress(RewritingTemplateError):  # then it is a row of its own
                        between = continuation_ids(tokenizer, history, turn, further, options, calls, cut=point.cut)
                        return self._goes_on(point, between)
                    break
            ids = prompt_ids(tokenizer, ask.messages, options)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RefusedError(f"messages: the model's chat template cannot write them: {error}", "messages") from error
        return self._conversation.branch(ids)

    def _text(self, ask: Ask) -> Branch:
        """Return the branch that a text completion belongs to."""
        tokenizer, prompt = self._conversation.tokenizer, ask.prompt
        if not isinstance(prompt, str):
            ids = list(prompt)
            tips = [p for _, p in self._written if self._is_tip(p) and ids[: p.length] == p.branch.ids]
            return self._told(tips[0].branch, ids[tips[0].length :]) if tips else self._conversation.branch(ids)
        shared = max(
            (entry for entry in self._written if prompt.startswith(entry[0])), key=lambda e: len(e[0]), default=None
        )
        if shared is None:
            return self._conversation.branch(tokenizer(prompt).input_ids)
        text, point = shared
        rest = prompt[len(text) :]
        if point.ended:
            end = tokenizer.decode(point.branch.ids[point.length - 1])
            if not rest.startswith(end):  # the text goes on where the model had ended
                point = replace(point, length=point.length - 1)
            rest = rest.removeprefix(end)
        return self._goes_on(point, tokenizer(rest, add_special_tokens=False).input_ids)

    def _goes_on(self, point: _Point, between: list[int]) -> Branch:
        """Continue after a turn, in its branch or, if that went on already, in one of its own."""
        if self._is_tip(point):
            return self._told(point.branch, between)
        return self._conversation.branch(point.branch.ids[: point.length] + between)

    def _is_tip(self, point: _Point) -> bool:
        return point.branch not in self._busy and len(point.branch.ids) == point.length

    def _options(self, ask: Ask) -> dict[str, Any]:
        """Return the arguments of the chat template: the problem's, overridden by the request's."""
        problem = self._conversation.problem
        return {**problem.chat_template, **dict(ask.template), **({"tools": list(ask.tools)} if ask.tools else {})}

    @staticmethod
    def _told(branch: Branch, ids: list[int]) -> Branch:
        if ids:
            branch.tell(ids)
        return branch


def _keys(ask: Ask, messages: Sequence[dict[str, Any]]) -> list[bytes]:
    """Return a key for each beginning of a chat; tools and the template's arguments are part of it."""
    begun = _digest(b"", [ask.tools, ask.template])
    return list(accumulate(messages, _digest, initial=begun))[1:]


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(before + text.encode(errors="surrogatepass"), digest_size=16).digest()
