"""OpenAI's API for programs of a run, at an address of this machine alone: each conversation has a key of its own."""

from __future__ import annotations

import asyncio
import json
import secrets
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from fp8rl.rollout.environments.harness.recording import RecordedTurn, Recording
from fp8rl.rollout.environments.harness.requests import MODEL, Ask, RefusedError, read
from fp8rl.rollout.loopback import reach_loopback
from fp8rl.rollout.types import LOOPBACK, SamplingParams

_MOST_BYTES = 32 << 20
"""The longest body."""
_ESCAPED, _OVERHEAD = 6, 1 << 20
"""Bytes of JSON that a byte of text may take, and those for all else that a request says."""
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_HEADERS_S = 60.0
"""Seconds that a connection may be open without a whole request's headers, the first or a next one."""


class ProgramEndpoint:
    """The server. Its handlers run in the event loop that opens it, and `url` is its base URL once it is open."""

    def __init__(self, tool_parser: str | None, override: Collection[str], same_keys: bool = False) -> None:
        """same_keys: a later conversation may have the key of one that is over."""
        self._tool_parser, self._override = tool_parser, override
        self._keys: list[str] | None = [] if same_keys else None
        self._open: dict[str, tuple[Recording, SamplingParams, int]] = {}
        self._runner: web.AppRunner | None = None
        self._opening = asyncio.Lock()
        self.url = ""

    async def open(self) -> None:
        """Listen, if it does not yet. Conversations begin many at a time, and each waits until it does."""
        async with self._opening:
            if self._runner is None:
                await self._listen()

    async def _listen(self) -> None:
        reach_loopback()  # a program in this process brings its own client
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[_in_openais_form])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._text)
        self._runner = web.AppRunner(app, access_log=None, auto_decompress=False, keepalive_timeout=_HEADERS_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, LOOPBACK, 0)
        await site.start()
        self.url = f"http://{LOOPBACK}:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        """Stop listening. A second call does nothing."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @contextmanager
    def recorded(self, recording: Recording, sampling: SamplingParams, vocabulary: int) -> Iterator[str]:
        """Open a key whose requests are answered and recorded in `recording`, as long as the block lasts."""
        key = self._keys.pop() if self._keys else secrets.token_urlsafe(24)
        self._open[key] = recording, sampling, vocabulary
        try:
            yield key
        finally:
            del self._open[key]
            if self._keys is not None:
                self._keys.append(key)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if self._of(request) is None:
            return _error(_NO_KEY)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "fp8rl"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, chat=True)

    async def _text(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, chat=False)

    async def _answered(self, request: web.Request, chat: bool) -> web.StreamResponse:
        opened = self._of(request)
        if opened is None:
            return _error(_NO_KEY)
        recording, sampling, vocabulary = opened
        param = "messages" if chat else "prompt"
        try:
            most = min(_MOST_BYTES, _OVERHEAD + _ESCAPED * recording.most_bytes)
            body = _unpacked(await request.read(), request.headers.get("Content-Encoding", "identity"), most)
            if len(body) > most:  # even to parse it would take memory
                raise recording.no_room(param)
            ask = read(body, chat, sampling, self._override, vocabulary)
            if ask.calls and self._tool_parser is None:
                raise RefusedError(
                    "tools: found some, expected the format of the model's tool calls. Set "
                    "environment.harness.tool_parser",
                    "tools",
                )
            said = await recording.answer(ask)
        except RefusedError as error:
            return _error(error)
        except web.HTTPRequestEntityTooLarge:
            return _error(recording.no_room(param))
        if not ask.stream:
            return web.json_response(_whole(said, chat))
        return await _streamed(request, said, ask, chat)

    def _of(self, request: web.Request) -> tuple[Recording, SamplingParams, int] | None:
        return self._open.get(request.headers.get("Authorization", "").removeprefix("Bearer ").strip())


_NO_KEY = RefusedError(
    "found no key of an active conversation, expected the one in OPENAI_API_KEY",
    status=401,
    code="invalid_api_key",
)


@web.middleware
async def _in_openais_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give a refusal of the library OpenAI's form."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _error(RefusedError(f"{request.method} {request.path[:80]}: {error.reason}", status=error.status))


def _unpacked(body: bytes, encoding: str, most: int) -> bytes:
    """Decompress a body; of a longer one, return at most `most` bytes and one more.

    Raises RefusedError: it cannot be unpacked.
    """
    if encoding.lower() == "identity":
        return body
    try:
        unpacking = zlib.decompressobj(_WINDOWS[encoding.lower()])
        unpacked = unpacking.decompress(body, most + 1)
    except KeyError:
        expected = f"{' or '.join(_WINDOWS)}, or none"
        raise RefusedError(f"Content-Encoding: found {encoding[:80]!r}, expected {expected}") from None
    except zlib.error as error:
        raise RefusedError(f"body: found broken {encoding} ({error}), expected it whole") from error
    if not unpacking.eof and len(unpacked) <= most:
        raise RefusedError(f"body: found broken {encoding} without its end, expected it whole")
    return unpacked


def _error(error: RefusedError) -> web.Response:
    body = {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": error.code}
    return web.json_response({"error": body}, status=error.status)


def _about(said: RecordedTurn, chat: bool, kind: str) -> dict[str, Any]:
    return {"id": f"{'chatcmpl' if chat else 'cmpl'}-{said.number}", "object": kind, "created": 0, "model": MODEL}


def _usage(said: RecordedTurn) -> dict[str, int]:
    return {
        "prompt_tokens": said.prompt,
        "completion_tokens": said.tokens,
        "total_tokens": said.prompt + said.tokens,
    }


def _whole(said: RecordedTurn, chat: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": said.reason, "logprobs": None}
    if chat:
        message: dict[str, Any] = {"role": "assistant", "content": said.text if said.text or not said.calls else None}
        choice["message"] = message | ({"tool_calls": list(said.calls)} if said.calls else {})
    else:
        choice["text"] = said.text
    kind = "chat.completion" if chat else "text_completion"
    return {**_about(said, chat, kind), "choices": [choice], "usage": _usage(said)}


async def _streamed(request: web.Request, said: RecordedTurn, ask: Ask, chat: bool) -> web.StreamResponse:
    """Return the turn as events, all at once: it is complete, and a call of a tool can only be read whole."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        await response.prepare(request)
        for event in _events(said, ask, chat):
            await response.write(f"data: {event}\n\n".encode())
        await response.write_eof()
    except ConnectionError:
        pass  # abandoned; what was sampled is recorded
    return response


def _events(said: RecordedTurn, ask: Ask, chat: bool) -> Iterator[str]:
    about = _about(said, chat, "chat.completion.chunk" if chat else "text_completion")

    def event(part: dict[str, Any], reason: str | None) -> str:
        choice = {
            "index": 0,
            "finish_reason": reason,
            **({"delta": part} if chat else {"text": part.get("content", "")}),
        }
        return json.dumps({**about, "choices": [choice]})

    yield event({"role": "assistant", "content": said.text}, None)
    if said.calls:
        yield event({"tool_calls": [{"index": i, **call} for i, call in enumerate(said.calls)]}, None)
    yield event({}, said.reason)
    if ask.usage:
        yield json.dumps({**about, "choices": [], "usage": _usage(said)})
    yield "[DONE]"
