"""Records a conversation between a program and the model, as rows of tokens.

A request is looked up by its messages. If they continue a recorded turn of the model, the row continues from its
recorded tokens, and only the text after this turn is tokenized. Otherwise a new row begins. It has as many recorded
tokens as the history of the request shares with the record.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import jinja2

from fp8rl.rollout.tasks.chat import RewritingTemplateError, continuation_ids, prompt_ids
from fp8rl.rollout.tasks.environments.branch import Branch, ConversationOverError
from fp8rl.rollout.tasks.environments.conversation import Conversation
from fp8rl.rollout.tasks.openai import Answer, CompletionRequest, Refusal, read_message
from fp8rl.rollout.tasks.tokens import behind_ids, text_ids, text_of
from fp8rl.rollout.tasks.tool_calls import parse_calls

_AT_ONCE = 1 << 16
"""A request with at most this many bytes is tokenized in the event loop. This takes less time than to receive it."""


@dataclass(frozen=True)
class _Point:
    """The end of a turn of the model: tokens `begin` to `length` of a branch."""

    branch: Branch
    begin: int
    length: int
    ended: bool
    """Whether the last of these tokens is the end of turn."""
    truncated: bool
    """Whether the length ended the turn."""


class Recording:
    """Records the turns of one conversation."""

    def __init__(self, conversation: Conversation, tool_parser: str | None, max_requests: int) -> None:
        self.conversation, self._tool_parser, self._left = conversation, tool_parser, max_requests
        self._most = max_requests
        self._tokenizing = asyncio.Lock()
        self._points: dict[bytes, _Point] = {}
        self._written: list[tuple[str, _Point]] = []
        self._busy: set[Branch] = set()
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.over = False
        """Whether there was no room for a turn, so that the program could not go on."""
        self.lost = asyncio.Event()
        """Set if an error of an engine has ended the conversation."""

    async def answer(self, request: CompletionRequest) -> Answer:
        """Sample the model's turn after a request.

        Raises Refusal: there is no room for the turn, or the request does not let the model answer.
        """
        if request.may_call and self._tool_parser is None:
            raise Refusal(
                "tools: found tools, but no parser for the model's tool calls, expected "
                "environment.harness.tool_parser to be set. Set it to SGLang's name of the format",
                "tools",
            )
        if not self._left:
            raise Refusal(
                f"found more than {self._most} requests, expected at most this number "
                "(environment.harness.max_requests)",
                status=429,
            )
        self._left -= 1
        try:
            begin = self._chat if request.messages else self._text
            async with self._tokenizing:  # a long text in a thread, beside the conversations of others
                branch = begin(request) if request.size <= _AT_ONCE else await asyncio.to_thread(begin, request)
            point, text = await self._sampled(branch, request)
        except ConversationOverError:
            raise self.no_room("messages" if request.messages else "prompt") from None
        except Refusal:
            raise
        except Exception:
            self.lost.set()
            raise
        return self._recorded(point, request, text)

    def no_room(self, param: str) -> Refusal:
        """Note that there was no room for a turn, and return the refusal of its request."""
        self.over = True
        message = "no room is left for an answer (rollout.max_new_tokens, rollout.context_length)"
        return Refusal(message, param, code="context_length_exceeded")

    async def wait(self) -> None:
        """Wait until no request is being answered. So answers for which the program did not wait are recorded too."""
        async with self._tokenizing:  # whose request is under way, too
            pass
        await self._idle.wait()

    def _recorded(self, point: _Point, request: CompletionRequest, text: str) -> Answer:
        """Record a turn under the keys of requests that may continue it."""
        calls: tuple[dict[str, Any], ...] = ()
        if request.may_call and self._tool_parser is not None:
            text, calls = parse_calls(text, request.tools, self._tool_parser, self._calls)
            self._calls += len(calls)
        if request.messages:
            spoken = read_message({"role": "assistant", "content": text, "tool_calls": calls}, "messages")
            self._points[_keys(request, (*request.messages, spoken))[-1]] = point  # as a program sends it back
        else:
            prompt = request.prompt
            before = prompt if isinstance(prompt, str) else text_of(self.conversation.tokenizer, prompt, first=True)
            self._written += [(before + shown, at) for shown, at in self._shown(point, text)]
        reason = "tool_calls" if calls else "length" if point.truncated else "stop"
        return Answer(text, calls, reason, point.begin, point.length - point.begin, self._most - self._left)

    def _shown(self, point: _Point, text: str) -> Iterator[tuple[str, _Point]]:
        """Yield a completion in each form with which later prompts may begin: with and without its stop."""
        decode, ids = partial(text_of, self.conversation.tokenizer), point.branch.ids[point.begin : point.length]
        yield decode(ids[:-1] if point.ended else ids), point
        for length in range(len(ids), 0, -1) if not point.ended else ():
            if len(shown := decode(ids[:length])) < len(text):
                break  # all that are left are shorter, and to decode them would hold up every other conversation
            if shown == text:
                yield text, replace(point, length=point.begin + length)

    async def _sampled(self, branch: Branch, request: CompletionRequest) -> tuple[_Point, str]:
        """Sample a turn into the branch. Return its end, and its text without the token that ended it."""
        tokenizer, ends = self.conversation.tokenizer, self.conversation.sampling.stop_token_ids
        each = [behind_ids(tokenizer, stop) for stop in request.stop]
        stops = tuple(ids[0] for ids in each if len(ids) == 1 and ids[0] not in ends)
        self._busy.add(branch)
        self._idle.clear()
        try:
            turn = await self.conversation.ask(branch, stops, request.max_tokens)
            ids = turn.token_ids
            decode = partial(text_of, tokenizer, first=bool(request.messages))
            text = decode(ids[:-1] if turn.finished else ids)
            count = len(ids)
            if found := [at for stop in request.stop if (at := text.find(stop)) >= 0]:
                # Up to the token that completes a stop of several.
                count = 1 + bisect_left(
                    range(1, len(ids) + 1), True, key=lambda n: any(stop in decode(ids[:n]) for stop in request.stop)
                )
                text = text[: min(found)]
            begin, whole = len(branch.ids), count == len(ids)
            branch.append_turn(turn, length=count, stops=stops)
            ended = whole and turn.finished and ids[-1] not in stops
            return _Point(branch, begin, begin + count, ended, whole and not (turn.finished or found)), text
        finally:
            self._busy.discard(branch)
            if not self._busy:
                self._idle.set()

    def _chat(self, request: CompletionRequest) -> Branch:
        """Return the branch for the next turn of a chat. It has all tokens before this turn."""
        tokenizer, options = self.conversation.tokenizer, {**self.conversation.problem.chat_template}
        options |= {**dict(request.chat_template_kwargs), **({"tools": list(request.tools)} if request.tools else {})}
        keys = _keys(request, request.messages)
        try:
            for end in range(len(request.messages), 0, -1):
                if (point := self._points.get(keys[end - 1])) is not None:
                    turn = point.branch.ids[point.begin : point.length]
                    calls = request.messages[end - 1].get("tool_calls", ())
                    history, further = request.messages[: end - 1], request.messages[end:]
                    with suppress(RewritingTemplateError):  # then it is a row of its own
                        between = continuation_ids(
                            tokenizer, history, turn, further, options, calls, truncated=point.truncated
                        )
                        return self._goes_on(point, between)
                    break
            ids = prompt_ids(tokenizer, request.messages, options)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise Refusal(f"messages: the model's chat template cannot write them: {error}", "messages") from error
        return self.conversation.branch(ids)

    def _text(self, request: CompletionRequest) -> Branch:
        """Return the branch for a text completion. It has all tokens of the prompt."""
        tokenizer, prompt = self.conversation.tokenizer, request.prompt
        if not isinstance(prompt, str):
            ids = list(prompt)
            tips = [p for _, p in self._written if self._is_tip(p) and ids[: p.length] == p.branch.ids]
            return self._goes_on(tips[0], ids[tips[0].length :]) if tips else self.conversation.branch(ids)
        shared = max((e for e in self._written if prompt.startswith(e[0])), key=lambda e: len(e[0]), default=None)
        if shared is None:
            return self.conversation.branch(text_ids(tokenizer, prompt))
        text, point = shared
        rest = prompt[len(text) :]
        if point.ended:
            end = text_of(tokenizer, point.branch.ids[point.length - 1 : point.length])
            if not rest.startswith(end):  # the text goes on where the model had ended
                point = replace(point, length=point.length - 1)
            rest = rest.removeprefix(end)
        return self._goes_on(point, behind_ids(tokenizer, rest, point.branch.ids[: point.length]))

    def _goes_on(self, point: _Point, between: list[int]) -> Branch:
        """Continue after a turn in the turn's branch or, if the branch has later tokens already, in a new branch."""
        if not self._is_tip(point):
            return self.conversation.branch(point.branch.ids[: point.length] + between)
        if between:
            point.branch.append_environment(between)
        return point.branch

    def _is_tip(self, point: _Point) -> bool:
        return point.branch not in self._busy and len(point.branch.ids) == point.length


def _keys(request: CompletionRequest, messages: Sequence[dict[str, Any]]) -> list[bytes]:
    """Return a key for each prefix of a chat's messages. Tools and the template's arguments are part of each key."""
    begun = _digest(b"", [request.tools, request.chat_template_kwargs])
    return list(accumulate(map(_with_thoughts_apart, messages), _digest, initial=begun))[1:]


def _with_thoughts_apart(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the model's thoughts separate from its text, also if the program sends them in the text."""
    thoughts, content = message.get("reasoning_content", "").strip(), message["content"]
    head, closed, rest = content.partition("</think>")  # <think> may stand in the prompt
    inside = head.strip().removeprefix("<think>").strip()
    if message["role"] != "assistant" or not (thoughts or closed):
        return message
    if closed and thoughts in ("", inside):
        thoughts, content = inside, rest
    return {**message, "reasoning_content": thoughts, "content": content.strip()}


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(before + text.encode(errors="surrogatepass"), digest_size=16).digest()
