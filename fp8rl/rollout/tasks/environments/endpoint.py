"""OpenAI's API for programs of a run, at an address of this machine alone: each conversation has a key of its own."""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from aiohttp import web
from aiohttp.typedefs import Handler

from fp8rl.numerics.core.process import LOOPBACK
from fp8rl.rollout.loopback import reach_loopback
from fp8rl.rollout.tasks.environments.recording import Recording
from fp8rl.rollout.tasks.openai import MODEL, Refusal, error_body, read_request
from fp8rl.rollout.types import SamplingParams

_CHAT = "/v1/chat/completions"
_MOST_BYTES = 32 << 20
"""The longest body."""
_ESCAPED, _OVERHEAD = 6, 1 << 20
"""Bytes of JSON that a byte of text may take, and those for all else that a request says."""
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_HEADERS_S = 60.0
"""Seconds that a connection may be open without a whole request's headers, the first or a next one."""


class ProgramEndpoint:
    """The server. Its handlers run in the event loop that opens it, and `url` is its base URL once it is open."""

    def __init__(self, tool_parser: str | None, override: Collection[str]) -> None:
        self._tool_parser, self._override = tool_parser, override
        self._open: dict[str, tuple[Recording, SamplingParams, int]] = {}
        self._runner: web.AppRunner | None = None
        self._opening = asyncio.Lock()
        self.url = ""

    async def open(self) -> None:
        """Listen, if it does not yet. Conversations begin many at a time, and each waits until it does."""
        async with self._opening:
            if self._runner is not None:
                return
            reach_loopback()  # a program in this process brings its own client
            app = web.Application(client_max_size=_MOST_BYTES, middlewares=[_in_openais_form])
            app.router.add_get("/v1/models", self._models)
            for path in (_CHAT, "/v1/completions"):
                app.router.add_post(path, self._complete)
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
        key = secrets.token_urlsafe(24)
        self._open[key] = recording, sampling, vocabulary
        try:
            yield key
        finally:
            del self._open[key]

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if _key(request) not in self._open:
            return _refused(_NO_KEY)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "fp8rl"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if (opened := self._open.get(_key(request))) is None:
            return _refused(_NO_KEY)
        recording, sampling, vocabulary = opened
        chat = request.path == _CHAT
        param = "messages" if chat else "prompt"
        try:
            most = min(_MOST_BYTES, _OVERHEAD + _ESCAPED * recording.most_bytes)
            body = _unpacked(await request.read(), request.headers.get("Content-Encoding", "identity"), most)
            if len(body) > most:  # even to parse it would take memory
                raise recording.no_room(param)
            asked = read_request(body, chat, sampling, self._override, vocabulary)
            if asked.may_call and self._tool_parser is None:
                raise Refusal(
                    "tools: found some, expected the format of the model's tool calls. Set "
                    "environment.harness.tool_parser",
                    "tools",
                )
            answer = await recording.answer(asked)
        except Refusal as refusal:
            return _refused(refusal)
        except web.HTTPRequestEntityTooLarge:
            return _refused(recording.no_room(param))
        if asked.stream:
            return await _streamed(request, answer.events(chat, asked.include_usage))
        return web.json_response(answer.completion(chat))


def _key(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ").strip()


_NO_KEY = Refusal(
    "found no key of an active conversation, expected the one in OPENAI_API_KEY", status=401, code="invalid_api_key"
)


@web.middleware
async def _in_openais_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give a refusal of the library OpenAI's form."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _refused(Refusal(f"{request.method} {request.path[:80]}: {error.reason}", status=error.status))


def _unpacked(body: bytes, encoding: str, most: int) -> bytes:
    """Decompress a body; of a longer one, return at most `most` bytes and one more.

    Raises Refusal: it cannot be unpacked.
    """
    if encoding.lower() == "identity":
        return body
    try:
        unpacking = zlib.decompressobj(_WINDOWS[encoding.lower()])
        unpacked = unpacking.decompress(body, most + 1)
    except KeyError:
        expected = f"{' or '.join(_WINDOWS)}, or none"
        raise Refusal(f"Content-Encoding: found {encoding[:80]!r}, expected {expected}") from None
    except zlib.error as error:
        raise Refusal(f"body: found broken {encoding} ({error}), expected it whole") from error
    if not unpacking.eof and len(unpacked) <= most:
        raise Refusal(f"body: found broken {encoding} without its end, expected it whole")
    return unpacked


def _refused(refusal: Refusal) -> web.Response:
    body = error_body(str(refusal), refusal.status, refusal.param, refusal.code)
    return web.json_response(body, status=refusal.status)


async def _streamed(request: web.Request, events: Iterable[str]) -> web.StreamResponse:
    """Return the turn as events, all at once: it is complete, and a call of a tool can only be read whole."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {event}\n\n".encode())
        await response.write_eof()
    except ConnectionError:
        pass  # abandoned; what was sampled is recorded
    return response
