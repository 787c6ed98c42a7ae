"""An environment that runs a user's program. The program calls OpenAI's API and knows nothing of training.

The API listens only on this machine. Each conversation has its own key.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from typing import IO, Any

from aiohttp import web
from aiohttp.typedefs import Handler

from fp8rl.numerics.core.process import LOOPBACK
from fp8rl.rollout.deadlines import end, end_process
from fp8rl.rollout.loopback import reach_loopback
from fp8rl.rollout.tasks.environments import HarnessSection, supervisor
from fp8rl.rollout.tasks.environments.branch import ConversationOverError
from fp8rl.rollout.tasks.environments.conversation import Conversation
from fp8rl.rollout.tasks.environments.recording import Recording
from fp8rl.rollout.tasks.openai import MODEL, Refusal, read_request
from fp8rl.rollout.types import Problem

Program = Callable[[str, str, Problem], Awaitable[Any]]
"""An async function of a base URL, a key and the problem. It returns the result of the environment."""

_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")
"""Environment variables that a command gets from the run. Keys of other services are not passed."""
_KEPT_OUTPUT, _KEPT_ERRORS = 1 << 20, 4096
"""Numbers of bytes that are kept from the end of a command's output, for its result, and of its errors."""
_CHAT = "/v1/chat/completions"
_MOST_BYTES = 32 << 20
"""Largest number of bytes of a request's body after decompression."""
_HEADERS_S = 60.0
"""A connection must send all headers of a request within this many seconds."""


class ProgramError(Exception):
    """A program took too long, or a command ended with a status other than 0."""


class Harness:
    """Lets a program talk to the model, and records the model's turns.

    Each conversation has its own key, so a program cannot reach another conversation.
    """

    def __init__(self, config: HarnessSection, program: Program | None) -> None:
        """program: the function to run in place of the command."""
        self._config, self._program = config, program
        self._endpoint = ProgramEndpoint(config.override)

    async def __call__(self, conversation: Conversation) -> Any:
        """Run the program, and return its result.

        Raises ProgramError. Raises ConversationOverError: no room was left for an answer, or the engines are lost.
        """
        await self._endpoint.open()
        recording = Recording(conversation, self._config.tool_parser, self._config.max_requests)
        with self._endpoint.recorded(recording) as key:
            run = self._program or self._command
            program = asyncio.ensure_future(run(self._endpoint.url, key, conversation.problem))
            lost = asyncio.ensure_future(recording.lost.wait())
            try:
                async with asyncio.timeout(self._config.deadline_s):
                    await asyncio.wait({program, lost}, return_when=asyncio.FIRST_COMPLETED)
            except TimeoutError:
                raise ProgramError(
                    f"the program took more than {self._config.deadline_s:g} s (environment.harness.deadline_s)"
                ) from None
            finally:
                await end(lost, program)
            if recording.lost.is_set():  # the conversation says why
                raise ConversationOverError
            if recording.over and program.exception() is not None:
                raise ConversationOverError from program.exception()
            returned = program.result()
            await recording.wait()
            return returned

    async def close(self) -> None:
        """Stop listening."""
        await self._endpoint.close()

    async def _command(self, base_url: str, api_key: str, problem: Problem) -> Any:
        """Run the command. If the last line of its output is JSON, return its value, else None."""
        config = self._config
        names = [*_PASSED, *config.variables]
        variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": MODEL}
        environment = {name: os.environ[name] for name in names if name in os.environ} | variables
        reach_loopback(environment)
        given = {"question": problem.question, "messages": problem.conversation, "fields": dict(problem.fields)}
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:  # what it says takes no memory
            process = await asyncio.create_subprocess_exec(
                *supervisor.COMMAND,
                *config.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=errors,
                cwd=config.directory,
                env=environment,
            )
            try:
                await process.communicate(json.dumps(given, default=str).encode())
            finally:
                await end_process(process)  # which ends what it has started
            printed, tail = _end_of(output, _KEPT_OUTPUT), _end_of(errors, _KEPT_ERRORS)
        if process.returncode:
            raise ProgramError(f"the command {' '.join(config.command)} ended with status {process.returncode}: {tail}")
        try:
            return json.loads(printed.splitlines()[-1]) if printed else None
        except ValueError:
            return None


def _end_of(file: IO[bytes], count: int) -> str:
    """Return the text of the last `count` bytes of a file."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - count))
    return file.read().decode(errors="replace").strip()


# The endpoint of all conversations.


class ProgramEndpoint:
    """The server of the API. Its handlers run in the event loop that opens it. After `open`, `url` is its base URL."""

    def __init__(self, override: Collection[str]) -> None:
        self._override = override
        self._open: dict[str, Recording] = {}
        self._runner: web.AppRunner | None = None
        self._opening = asyncio.Lock()
        self.url = ""

    async def open(self) -> None:
        """Start the server unless it listens already. Calls at the same time wait for the same start."""
        async with self._opening:
            if self._runner is not None:
                return
            reach_loopback()  # a program in this process brings its own client
            app = web.Application(client_max_size=_MOST_BYTES, middlewares=[_in_openais_form])
            app.router.add_get("/v1/models", self._models)
            for path in (_CHAT, "/v1/completions"):
                app.router.add_post(path, self._complete)
            self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=_HEADERS_S)
            await self._runner.setup()
            await web.TCPSite(self._runner, LOOPBACK, 0).start()
            self.url = f"http://{LOOPBACK}:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        """Stop listening. A second call does nothing."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @contextmanager
    def recorded(self, recording: Recording) -> Iterator[str]:
        """Yield a new key. Inside the block, requests with the key are answered, and recorded in `recording`."""
        key = secrets.token_urlsafe(24)
        self._open[key] = recording
        try:
            yield key
        finally:
            del self._open[key]

    def _recording(self, request: web.Request) -> Recording:
        """Return the recording for a request's key. Raises Refusal: no conversation that is under way has this key."""
        key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if key not in self._open:
            message = "found no key of an active conversation, expected the key in OPENAI_API_KEY"
            raise Refusal(message, status=401, code="invalid_api_key")
        return self._open[key]

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._recording(request)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "fp8rl"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        recording, chat = self._recording(request), request.path == _CHAT
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise recording.no_room("messages" if chat else "prompt") from None
        sampling, vocabulary = recording.conversation.sampling, len(recording.conversation.tokenizer)
        asked = read_request(body, chat, sampling, self._override, vocabulary)
        answer = await recording.answer(asked)
        if not asked.stream:
            return web.json_response(answer.completion(chat))
        # The whole turn as events, at once, because tool calls can only be parsed whole.
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            await response.prepare(request)
            for event in answer.events(chat, asked.include_usage):
                await response.write(f"data: {event}\n\n".encode())
            await response.write_eof()
        except ConnectionError:
            pass  # abandoned; what was sampled is recorded
        return response


@web.middleware
async def _in_openais_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn a refusal, or an error of the HTTP library, into OpenAI's form."""
    try:
        return await handler(request)
    except Refusal as refused:
        refusal = refused
    except web.HTTPException as error:
        refusal = Refusal(f"{request.method} {request.path[:80]}: {error.reason}", status=error.status)
    said = {"message": str(refusal), "type": "invalid_request_error", "param": refusal.param, "code": refusal.code}
    return web.json_response({"error": said}, status=refusal.status)
