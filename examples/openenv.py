"""Plays an environment of OpenEnv over the WebSocket of its server. Nothing of OpenEnv's need be installed here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from fp8rl import Conversation

_MOST_BYTES = 64 << 20


class OpenEnvError(Exception):
    """A server of OpenEnv is not there, or refuses a session or a reset."""


async def openenv(
    conversation: Conversation,
    url: str,
    action: str = "",
    observation: str = "",
    reset: Mapping[str, Any] | None = None,
    steps: int = 16,
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
        raise OpenEnvError(f"reset: found {own!r} in the problem, expected an object; correct the data")
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
