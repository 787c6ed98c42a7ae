"""Environments of OpenEnv: the words of its own server, kept, and a model whose lines are given."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from examples.openenv import OpenEnvError, openenv
from fp8rl.rollout.tasks.environments.conversation import transcript
from tests.support.conversations import EOS, Stage

# What openenv 0.10.0 and the environment that `openenv init echoes` writes said on 2026-11-24, word for word.
READY = (
    '{"type":"observation","data":{"observation":{"metadata":{},"echoed_message":"Echoes environment ready!",'
    '"message_length":0},"reward":0.0,"done":false}}'
)
FIRST = (
    '{"type":"observation","data":{"observation":{"metadata":{"original_message":"12","step":1},"echoed_message":"12",'
    '"message_length":2},"reward":0.2,"done":false,"metadata":{"original_message":"12","step":1}}}'
)
REFUSED = (
    '{"type":"error","data":{"message":"Invalid message","code":"VALIDATION_ERROR","errors":[{"type":"missing",'
    '"loc":["message"],"msg":"Field required","input":{},"url":"https://errors.pydantic.dev/2.14/v/missing"}]}}'
)
LAST = (
    '{"type":"observation","data":{"observation":{"metadata":{"original_message":"3456789012345","step":2},'
    '"echoed_message":"3456789012345","message_length":13},"reward":1.0,"done":true}}'
)


class Server:
    """Says the kept lines, one to each message, and keeps the messages."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.heard = list(lines), list[dict[str, Any]]()

    async def answer(self, request: web.Request) -> web.WebSocketResponse:
        spoken = web.WebSocketResponse()
        await spoken.prepare(request)
        async for message in spoken:
            assert message.type is WSMsgType.TEXT
            self.heard.append(json.loads(message.data))
            if not self.lines:
                break
            await spoken.send_str(self.lines.pop(0))
        return spoken


@pytest.fixture
def serve() -> Iterator[Any]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runners: list[web.AppRunner] = []

    async def start(server: Server) -> str:
        app = web.Application()
        app.router.add_get("/ws", server.answer)
        runners.append(web.AppRunner(app, shutdown_timeout=0.1))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runners[-1].addresses[0][1]}"

    yield lambda server: asyncio.run_coroutine_threadsafe(start(server), loop).result()
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_each_turn_is_an_action_and_what_is_seen_then_the_next_message(play: Stage, tokenizer: Any, serve: Any) -> None:
    server = Server(READY, FIRST, LAST)
    settings = {"url": serve(server), "action": "message", "observation": "echoed_message", "reset": {"seed": 3}}
    answer = play(partial(openenv, **settings), "12" + EOS, "3456789012345" + EOS, max_new_tokens=100)
    assert tokenizer.decode(answer.prompt_ids) == "<|user|>1+2=?\nEchoes environment ready!<|assistant|>"
    said = [words for _, words in transcript(answer, tokenizer)]
    assert said == ["12" + EOS, "<|user|>12<|assistant|>", "3456789012345"]
    assert answer.outcome == {"reward": 1.2, "steps": 2.0, "unread": 0.0}
    assert [each["type"] for each in server.heard] == ["reset", "step", "step"]
    assert [each["data"] for each in server.heard] == [{"seed": 3}, {"message": "12"}, {"message": "3456789012345"}]


def test_whole_actions_are_json_and_one_that_is_refused_is_told_why(play: Stage, tokenizer: Any, serve: Any) -> None:
    server = Server(READY, REFUSED, FIRST)
    lines = ["12" + EOS, '{"message": "12"}' + EOS]
    answer = play(partial(openenv, url=serve(server), steps=2), *lines, max_new_tokens=400)
    said = [words for by, words in transcript(answer, tokenizer) if by == "environment"]
    assert said == ["<|user|>Invalid message; message: Field required<|assistant|>"]
    assert answer.outcome == {"reward": 0.2, "steps": 2.0, "unread": 1.0}
    assert [each["data"] for each in server.heard] == [{}, {}, {"message": "12"}]


def test_a_server_that_is_not_there_or_refuses_a_reset_is_named(play: Stage, serve: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(OpenEnvError, match="url: found no server of OpenEnv at http://127.0.0.1"):
            play(partial(openenv, url=f"http://127.0.0.1:{taken.getsockname()[1]}"))
    full = '{"type":"error","data":{"message":"Server at capacity: 1/1 sessions active","code":"CAPACITY_REACHED"}}'
    with pytest.raises(OpenEnvError, match="refused {}: Server at capacity"):
        play(partial(openenv, url=serve(Server(full))))
    with pytest.raises(OpenEnvError, match="step: the server closed its session"):
        play(partial(openenv, url=serve(Server(READY))), "1" + EOS)


def test_a_problem_without_arguments_of_its_own_is_reset_by_those_of_the_spec(play: Stage, serve: Any) -> None:
    server = Server(READY, LAST)
    environment = partial(openenv, url=serve(server), reset={"seed": 3})
    play(environment, "{}" + EOS, fields={"reset": None}, max_new_tokens=100)
    assert server.heard[0] == {"type": "reset", "data": {"seed": 3}}
    with pytest.raises(OpenEnvError, match="reset: found 'seed=3' in the problem, expected an object"):
        play(environment, fields={"reset": "seed=3"})
