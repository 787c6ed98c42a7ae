"""Environments of the examples, and OpenEnv's by its server's kept words; Python code that goes wrong harms nobody."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import WSMsgType, web

from examples.environments import calculator, guess, worked_out
from examples.openenv import OpenEnvError, openenv
from examples.python_tool import LONGEST_OUTPUT, Ran, last_block, python, run_python
from fp8rl.rollout.tasks.environments.conversation import transcript
from tests.support.conversations import EOS, Stage
from tests.support.servers import wait_until


def text(play: Stage, tokenizer: Any, *arguments: Any, **settings: Any) -> tuple[str, dict[str, float]]:
    answer = play(*arguments, **settings)
    return "".join(said for _, said in transcript(answer, tokenizer)), answer.outcome


def test_the_calculator_works_out_what_the_model_writes_before_an_equals_sign(play: Stage, tokenizer: Any) -> None:
    said, outcome = text(play, tokenizer, calculator, "(9+4=", ",(what=", ",(3*-2=", "\n#### 7" + EOS)
    assert said == "(9+4=13),(what=?),(3*-2=-6)\n#### 7"
    assert outcome == {"calls": 3.0, "unread": 1.0}
    said, outcome = text(play, tokenizer, partial(calculator, calls=1), "(9+4=", ",(1+1=2" + EOS)
    assert said == "(9+4=13),(1+1=2" and outcome["calls"] == 1.0


@pytest.mark.parametrize(
    ("written", "value"),
    [("9+4", 13), ("13 - 18", -5), ("-3*4", -12), ("9", None), ("9+", None), ("1/2", None), ("9" * 10 + "+1", None)],
)
def test_what_the_calculator_can_read(written: str, value: int | None) -> None:
    assert worked_out(written) == value


def test_a_guess_is_answered_by_which_way_the_number_is(play: Stage, tokenizer: Any) -> None:
    said, outcome = text(play, tokenizer, guess, "9", "2", "5", answer="#### 5")
    assert said == "9<,2>,5" and outcome == {"reward": 1.0, "guesses": 3.0}
    said, outcome = text(play, tokenizer, guess, "x", "4", "6", answer="#### 5")
    assert said == "x?,4>,6" and outcome == {"reward": 0.0, "guesses": 3.0}
    said, outcome = text(play, tokenizer, partial(guess, tries=1), "5", answer="#### 5")
    assert said == "5" and outcome == {"reward": 1.0, "guesses": 1.0}


@pytest.mark.slow
def test_python_code_is_run_and_its_output_comes_back_as_a_message(play: Stage, tokenizer: Any) -> None:
    lines = ["try ```python\nprint(6*7)\n```" + EOS, "```python\n1/0\n```" + EOS, "#### 42" + EOS]
    answer = play(python, *lines, max_new_tokens=400)
    assert answer.outcome == {"calls": 2.0, "errors": 1.0}
    said = [words for by, words in transcript(answer, tokenizer) if by == "environment"]
    assert said[0] == "<|user|>42\n<|assistant|>" and "ZeroDivisionError" in said[1]


def test_the_last_whole_block_counts() -> None:
    assert last_block("a ```python\nx=1\n``` b ```python\nx=2\n``` c") == "x=2"
    assert last_block("none, or ```python\n not ended") is None


def ran(code: str, timeout_s: float = 20.0, memory_mib: int = 256) -> Ran:
    return asyncio.run(run_python(code, timeout_s=timeout_s, memory_mib=memory_mib))


@pytest.mark.slow
def test_output_comes_back_and_is_bounded() -> None:
    assert ran("print(2 + 3)") == Ran("5\n", True)
    assert len(ran("for _ in range(1000): print('y' * 1000)").text) == LONGEST_OUTPUT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "expected"),
    [("1/0", "ZeroDivisionError"), ("x = 'a' * 10**10", "MemoryError"),
     ("open('file', 'w').write('x' * 10**8)", "File too large"),
     ("import os; os.kill(os.getpid(), 9)", "it was ended by signal 9"), ("input()", "EOFError")],
)  # fmt: skip
def test_an_error_is_told(code: str, expected: str) -> None:
    found = ran(code)
    assert not found.ok and expected in found.text


@pytest.mark.slow
def test_there_is_no_network_here_or_in_a_child() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connects = f"import socket; socket.create_connection({server.getsockname()!r})"
        assert "PermissionError" in ran(connects).text
        child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {connects!r}])"
        assert "PermissionError" in ran(child).text


@pytest.mark.slow
def test_time_is_bounded_and_children_end_too_even_those_of_another_session() -> None:
    mark = uuid.uuid4().hex
    sleeps = f"import os, time\nos.setsid() if os.fork() == 0 else 0\ntime.sleep(600)  # {mark}"
    began = time.monotonic()
    code = f"import subprocess, sys\nfor _ in range(3): subprocess.Popen([sys.executable, '-c', {sleeps!r}])\n" + sleeps
    found = ran(code, timeout_s=2.0)
    assert found == Ran("\nit took more than 2 s", False) and time.monotonic() - began < 20 and not _with_mark(mark)


@pytest.mark.slow
def test_who_gives_up_waiting_leaves_nothing_running() -> None:
    async def given_up() -> None:
        await asyncio.wait_for(run_python("import time; time.sleep(600)", timeout_s=600), 2)

    before = set(Path("/tmp").glob("fp8rl-python-*"))
    with pytest.raises(TimeoutError):
        asyncio.run(given_up())
    assert wait_until(lambda: not set(Path("/tmp").glob("fp8rl-python-*")) - before, 5)


def _with_mark(mark: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if any(mark in part for part in p.info["cmdline"] or [])]


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
def serve():
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
