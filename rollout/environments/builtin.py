"""Environments of ours: `single_turn`, the default, `guess`, `calculator`, `python` and `openenv`."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from operator import add, mul, sub
from pathlib import Path
from typing import Annotated, Any

import aiohttp
from pydantic import Field

from fp8rl.numerics.core.errors import shown
from fp8rl.rollout.deadlines import end_process, within
from fp8rl.rollout.environments.conversation import Conversation

_Count = Annotated[int, Field(ge=1)]


async def single_turn(conversation: Conversation) -> None:
    """Let the model answer the question."""
    await conversation.sample()


HIGHER, LOWER, UNREAD = ">,", "<,", "?,"


async def guess(conversation: Conversation, tries: _Count = 3, tokens: _Count = 1) -> dict[str, float]:
    """Hide the data's answer, a number, and answer each guess with `>,` if it is higher, `<,` if lower, `?,` if unread.

    A guess is a turn of at most `tokens` tokens. Returns `reward` (1 if the number was found), and `guesses`, the
    number of turns.
    """
    hidden = int(conversation.problem.answer.rpartition("####")[2])
    for count in range(1, tries + 1):
        text = (await conversation.sample(max_new_tokens=tokens)).text
        try:
            guessed = int(text)
        except ValueError:
            guessed = None
        if guessed == hidden:
            return {"reward": 1.0, "guesses": count}
        if count < tries:
            conversation.tell(UNREAD if guessed is None else HIGHER if hidden > guessed else LOWER)
    return {"reward": 0.0, "guesses": tries}


OPEN, CALL, CLOSE = "(", "=", ")"
_SUM = re.compile(r"(-?\d{1,9})([-+*])(-?\d{1,9})")
_WORK_OUT = {"+": add, "-": sub, "*": mul}


async def calculator(conversation: Conversation, calls: Annotated[int, Field(ge=0)] = 16) -> dict[str, float]:
    """Continue the model's `(9+4=` with `13)`, and with `?)` if it is no sum, difference or product of two integers.

    calls: the most calculations; a further `=` calls nobody. Returns `calls`, and `unread`, the calls that it could not
    read.
    """
    said, counts = "", {"calls": 0.0, "unread": 0.0}
    while counts["calls"] < calls:
        turn = await conversation.sample(stop=[CALL])
        said += turn.text
        if turn.ended_by != CALL:
            return counts
        result = worked_out(said.rpartition(OPEN)[2])
        counts["calls"] += 1
        counts["unread"] += result is None
        conversation.tell(f"{'?' if result is None else result}{CLOSE}")
    await conversation.sample()
    return counts


def worked_out(text: str) -> int | None:
    """Return the value of two integers with a sign between them; None of anything else."""
    match = _SUM.fullmatch(text.replace(" ", ""))
    return None if match is None else int(_WORK_OUT[match[2]](int(match[1]), int(match[3])))


# Python code of a model, run in a process that has no network, little memory and little time.
#
# It is meant for code that goes wrong, not for an attacker: it can read what the user of the run can read.

LONGEST_OUTPUT = 4096
"""Characters of its output that are kept."""
_WARDEN = Path(__file__).with_name("warden.py")
_START_SECONDS = 20.0
"""Seconds in which the interpreter starts on a busy machine."""


@dataclass(frozen=True)
class Ran:
    """The result of code."""

    text: str
    """Its output, or the reason for its absence."""
    ok: bool
    """It ended by itself, without an error."""


async def run_python(code: str, *, timeout_s: float = 5.0, memory_mib: int = 512) -> Ran:
    """Run code in a process of its own, in an empty folder, and end it with all that it has started.

    Raises RuntimeError: this machine cannot take the network away from a process.
    """
    request = json.dumps(
        {"code": code, "timeout_s": timeout_s, "memory": memory_mib * 2**20, "longest": LONGEST_OUTPUT}
    )
    with tempfile.TemporaryDirectory(prefix="fp8rl-python-") as folder:
        warden = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_WARDEN)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=folder,
        )
        try:
            reply, error = await within(timeout_s + _START_SECONDS, warden.communicate(request.encode()))
        finally:
            await end_process(warden)  # which ends what it has started
    if warden.returncode:
        raise RuntimeError(f"the process for Python code has failed: {error.decode(errors='replace').strip()}")
    return Ran(**json.loads(reply))


FENCE, LANGUAGE = "```", "python"


async def python(
    conversation: Conversation,
    calls: Annotated[int, Field(ge=0)] = 4,
    timeout_s: Annotated[float, Field(gt=0.0)] = 5.0,
    memory_mib: _Count = 512,
    role: Annotated[str, Field(min_length=1)] = "user",
) -> dict[str, float]:
    """Run the block of code, ```` ```python ... ``` ````, that ends the model's turn, and append its output as a
    message.

    A turn without such a block is the answer. calls: the most blocks that are run. timeout_s, memory_mib: of one call.
    role: of the message, `tool` for models whose chat template has it. Returns `calls`, and `errors`, those of them
    that did not end well.
    """
    counts = {"calls": 0.0, "errors": 0.0}
    while True:
        code = last_block((await conversation.sample()).text)
        if code is None or counts["calls"] == calls:
            return counts
        result = await run_python(code, timeout_s=timeout_s, memory_mib=memory_mib)
        counts["calls"] += 1
        counts["errors"] += not result.ok
        conversation.message(role, result.text)


def last_block(text: str) -> str | None:
    """Return the code of the last whole block of Python; None without one."""
    before, fence, _ = text.rpartition(FENCE)
    _, opened, code = before.rpartition(FENCE + LANGUAGE)
    return code.strip("\n") if fence and opened else None


# Environments of OpenEnv, played over the WebSocket of their server; nothing of OpenEnv's need be installed here.

_MOST_BYTES = 64 << 20


class OpenEnvError(Exception):
    """A server of OpenEnv is not there, or refuses a session or a reset."""


async def openenv(
    conversation: Conversation,
    url: Annotated[str, Field(pattern="^(http|ws)s?://")],
    action: str = "",
    observation: str = "",
    reset: Mapping[str, Any] | None = None,
    steps: _Count = 16,
) -> dict[str, float]:
    """Play an environment of OpenEnv: each turn of the model is an action, each observation the next message.

    The problem's question and, below it, the observation of the reset open the conversation. It ends when the
    environment is done. url: of the server. action: the field of an action that takes a turn; empty: a turn is a whole
    action, as JSON. observation: the field that is shown; empty: all of them, as JSON. reset: arguments of the reset,
    and those in the problem's field `reset`, an object or null, beside them. steps: the most steps.

    Returns `reward`, the sum over the steps, `steps`, and `unread`, actions that the environment refused, whose reason
    the model is shown.
    """
    own = conversation.problem.fields.get("reset")
    if not isinstance(own, Mapping | None):
        raise OpenEnvError(f"reset: found {shown(own)} in the problem, expected an object; correct the data")
    arguments = {**(reset or {}), **(own or {})}
    counts = {"reward": 0.0, "steps": 0.0, "unread": 0.0}
    async with aiohttp.ClientSession() as http:
        try:
            socket = await http.ws_connect(f"{url.rstrip('/')}/ws", max_msg_size=_MOST_BYTES)
        except aiohttp.ClientError as error:
            raise OpenEnvError(
                f"url: found no server of OpenEnv at {url} ({error}); start it, or correct it"
            ) from error
        async with socket:
            begun = await _said(socket, "reset", arguments)
            if "message" in begun:
                raise OpenEnvError(f"reset: {url} refused {arguments}: {begun['message']}")
            seen = _shown(begun, observation)
            *before, last = conversation.problem.conversation
            conversation.begin([*before, {**last, "content": f"{last['content']}\n{seen}"}])
            while True:
                turn = await conversation.sample()
                result = await _said(socket, "step", _action(turn.text, action))
                counts["steps"] += 1
                counts["unread"] += "message" in result
                counts["reward"] += float(result.get("reward") or 0.0)
                if result.get("done") or counts["steps"] == steps:
                    return counts
                conversation.message("user", _shown(result, observation))


def _action(text: str, field: str) -> dict[str, Any]:
    """Return the action of a turn. Text that is no JSON object becomes one without fields, which the server refuses."""
    if field:
        return {field: text}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _shown(result: Mapping[str, Any], field: str) -> str:
    if "message" in result:
        lacking = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in result.get("errors", ())]
        return "; ".join([str(result["message"]), *lacking])
    seen = result["observation"]
    seen = seen[field] if field else seen
    return seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)


async def _said(socket: aiohttp.ClientWebSocketResponse, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Send a reset or a step; return the reply: `observation`, `reward` and `done`, or the `message` of an error."""
    await socket.send_json({"type": kind, "data": dict(data)})
    received = await socket.receive()
    if received.type is not aiohttp.WSMsgType.TEXT:
        raise OpenEnvError(f"{kind}: the server closed its session ({received.data or received.type.name})")
    found: dict[str, Any] = json.loads(received.data)["data"]
    return found
