"""An environment that is a program of the user's, which speaks OpenAI's API and knows nothing of training."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from fp8rl.rollout.deadlines import end, end_process
from fp8rl.rollout.loopback import reach_loopback
from fp8rl.rollout.tasks.environments import supervisor
from fp8rl.rollout.tasks.environments.branch import ConversationOverError
from fp8rl.rollout.tasks.environments.config import HarnessSection
from fp8rl.rollout.tasks.environments.conversation import Conversation
from fp8rl.rollout.tasks.environments.endpoint import ProgramEndpoint
from fp8rl.rollout.tasks.environments.recording import Recording
from fp8rl.rollout.tasks.openai import MODEL
from fp8rl.rollout.types import Problem

Program = Callable[[str, str, Problem], Awaitable[Any]]
"""An async function of a base URL, a key and the problem; it returns what an environment returns."""

_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")
"""Variables of the run that a command is given; keys of other services are not among them."""
_KEPT_OUTPUT, _KEPT_ERRORS = 1 << 20, 4096
"""Bytes of the end of a command's output, in which its result stands, and of its errors, which a message has."""
_PIECE = 1 << 16
"""Bytes that are read at a time."""


class ProgramError(Exception):
    """A command ended with another status than 0."""


class Harness:
    """Lets a program have a conversation, and records what the model says in it.

    Each conversation has a key of its own, so a program reaches nothing but its own.
    """

    def __init__(self, config: HarnessSection, program: Program | None) -> None:
        """program: runs in place of the command."""
        self._config, self._program = config, program
        self._endpoint = ProgramEndpoint(config.tool_parser, config.override)

    async def __call__(self, conversation: Conversation) -> Any:
        """Run the program, and return its result.

        Raises ProgramError, ConversationOverError: no room was left for an answer, or the engines are lost.
        """
        await self._endpoint.open()
        recording = Recording(conversation, self._config.tool_parser, self._config.max_requests)
        vocabulary = len(conversation.tokenizer)
        with self._endpoint.recorded(recording, conversation.sampling, vocabulary) as key:
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
            if not program.done() or program.cancelled():  # the engines are lost, which the conversation says
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
        """Run the command; return the JSON of the last line that it prints, if it is JSON."""
        config = self._config
        names = [*_PASSED, *config.variables]
        own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": MODEL}
        environment = {name: os.environ[name] for name in names if name in os.environ} | own
        reach_loopback(environment)
        process = await asyncio.create_subprocess_exec(
            *supervisor.COMMAND,
            *config.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=config.directory,
            env=environment,
        )
        given = {"question": problem.question, "messages": problem.conversation, "fields": dict(problem.fields)}
        try:
            output, errors = await _communicated(process, json.dumps(given, default=str).encode())
        finally:
            await end_process(process)  # which ends what it has started
        if process.returncode:
            said = errors.decode(errors="replace").strip()
            raise ProgramError(f"the command {' '.join(config.command)} ended with status {process.returncode}: {said}")
        lines = output.decode(errors="replace").strip().splitlines()
        try:
            return json.loads(lines[-1]) if lines else None
        except ValueError:
            return None


async def _communicated(process: asyncio.subprocess.Process, given: bytes) -> tuple[bytes, bytes]:
    """Send a command its input and wait for its end; return the ends of its output and of its errors.

    Reading never stops, so that a command that says much goes on, and takes no memory here.
    """

    async def send(stdin: asyncio.StreamWriter) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it need not read
            stdin.write(given)
            await stdin.drain()
        stdin.close()

    assert process.stdin and process.stdout and process.stderr
    _, output, errors = await asyncio.gather(
        send(process.stdin), _last(process.stdout, _KEPT_OUTPUT), _last(process.stderr, _KEPT_ERRORS)
    )
    await process.wait()
    return output, errors


async def _last(stream: asyncio.StreamReader, count: int) -> bytes:
    """Read a stream to its end; return its last `count` bytes."""
    kept = bytearray()
    while piece := await stream.read(_PIECE):
        kept += piece
        del kept[:-count]
    return bytes(kept)
