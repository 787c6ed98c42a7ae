"""Time that the endpoint for programs adds to the engine's: 64 conversations at once, three turns with a tool each."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
from aiohttp import web
from transformers import AutoTokenizer

from fp8rl.numerics.core.process import LOOPBACK
from fp8rl.rollout.tasks.environments.conversation import Conversation
from fp8rl.rollout.tasks.environments.harness import ProgramEndpoint
from fp8rl.rollout.tasks.environments.recording import Recording
from fp8rl.rollout.types import Group, Problem, Prompt, SamplingParams, Trajectory, prompt_ids
from lab.bench.measure import DEMO, Result

CONVERSATIONS, TURNS = 64, 3
ROUNDS, WARMUP = 5, 1
SECONDS_PER_TOKEN = 0.01
QUESTION = {"role": "user", "content": "9+4+5-8=?"}
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "The sum of two numbers.", "parameters": ADD}}
ENDPOINT, BARE = "endpoint", "a server that only waits"
PARSER = "qwen25"


def run() -> list[Result]:
    """The endpoint, and beside it a server that waits as long as the engine does and answers; in turns. The programs
    that ask are in a process of their own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    programs = context.Process(target=_programs, args=(there,), daemon=True)
    programs.start()
    sides = {ENDPOINT: partial(_endpoint, AutoTokenizer.from_pretrained(DEMO)), BARE: _bare}
    added: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(WARMUP + ROUNDS):
        for name, side in sides.items():
            began = time.process_time()
            found = asyncio.run(_asked(side, here))
            if index >= WARMUP:
                added[name] += [1e3 * seconds for seconds in found]
                cpu[name].append(1e3 * (time.process_time() - began) / len(found))
    here.send(None)
    programs.join()
    return [
        Result(
            name=f"endpoint: a request beside the engine's time, {CONVERSATIONS} conversations at once, median (ms)",
            value=statistics.median(added[ENDPOINT]),
            bar=5.0,
            at_least=False,
            parts={
                f"{name}, {what} (ms)": value
                for name in sides
                for what, value in {
                    "median": statistics.median(added[name]),
                    "mean": statistics.mean(added[name]),
                    "one of twenty": statistics.quantiles(added[name], n=20)[-1],
                    "CPU time": statistics.median(cpu[name]),
                }.items()
            },
        )
    ]


async def _asked(side: Any, programs: Connection) -> list[float]:
    async with side() as (url, keys):
        programs.send((url, keys))
        found: list[float] = await asyncio.to_thread(programs.recv)
    return found


def _engine_seconds(number: int, turn: int) -> float:
    """Seconds of a turn; turns end one after the other, as a model's do."""
    return (70 + _digits(number, turn)) * SECONDS_PER_TOKEN


def _digits(number: int, turn: int) -> int:
    return 1 + (37 * number + 53 * turn) % 64


@asynccontextmanager
async def _endpoint(tokenizer: Any) -> AsyncIterator[tuple[str, list[str]]]:
    """The endpoint, before an engine that takes its time and says what is given."""
    endpoint, sampling = ProgramEndpoint(()), SamplingParams(1000, stop_token_ids=(tokenizer.eos_token_id,))
    problem = Problem(QUESTION["content"], "#### 10")
    prompt = Prompt(problem, prompt_ids(tokenizer, problem))
    call = '<tool_call>\n{{"name": "add", "arguments": {{"a": {}, "b": 2}}}}\n</tool_call><|im_end|>'
    said = [tokenizer(call.format("1" * digits), add_special_tokens=False).input_ids for digits in range(65)]

    def conversation(number: int) -> Conversation:
        turns = iter(range(TURNS))

        async def engine(group: Group, sampling: SamplingParams) -> Trajectory:
            turn = next(turns)
            await asyncio.sleep(_engine_seconds(number, turn))
            ids, (seed,) = said[_digits(number, turn)], group.seeds
            return Trajectory(group.prompt.token_ids, ids, [-1.0] * len(ids), True, [1] * len(ids), 0, seed)

        return Conversation(prompt, number, sampling, engine, tokenizer, timeout_s=60.0)

    await endpoint.open()
    async with AsyncExitStack() as opened:
        opened.push_async_callback(endpoint.close)
        recordings = [Recording(conversation(number), PARSER, TURNS) for number in range(CONVERSATIONS)]
        yield (endpoint.url, [opened.enter_context(endpoint.recorded(recording)) for recording in recordings])


@asynccontextmanager
async def _bare() -> AsyncIterator[tuple[str, list[str]]]:
    """A server of the same library that does nothing but wait as long as the engine would; a key is a number."""
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}

    async def answer(request: web.Request) -> web.Response:
        asked = await request.json()
        number, turn = int(request.headers["Authorization"].removeprefix("Bearer ")), len(asked["messages"]) // 2
        await asyncio.sleep(_engine_seconds(number, turn))
        return web.json_response({"choices": [{"index": 0, "message": message}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, LOOPBACK, 0).start()
        yield f"http://{LOOPBACK}:{runner.addresses[0][1]}/v1", [str(number) for number in range(CONVERSATIONS)]
    finally:
        await runner.cleanup()


def _programs(pipe: Connection) -> None:
    """Ask whatever address comes by the pipe, all conversations at once, and send back the seconds of each request that
    the engine did not take."""
    while (asked := pipe.recv()) is not None:
        pipe.send(asyncio.run(_converse(*asked)))


async def _converse(url: str, keys: list[str]) -> list[float]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        found = await asyncio.gather(*(_program(session, url, key, number) for number, key in enumerate(keys)))
    return [seconds for of_one in found for seconds in of_one]


async def _program(session: aiohttp.ClientSession, url: str, key: str, number: int) -> list[float]:
    messages: list[dict[str, Any]] = [QUESTION]
    added = []
    for turn in range(TURNS):
        began = time.perf_counter()
        body = {"model": "policy", "messages": messages, "tools": [TOOL]}
        async with session.post(
            f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        ) as response:
            response.raise_for_status()
            answer = await response.json()
        added.append(time.perf_counter() - began - _engine_seconds(number, turn))
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
    return added
