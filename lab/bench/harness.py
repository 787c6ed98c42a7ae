"""What the endpoint for programs adds to a request, with 64 conversations at once and an engine of known time."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fp8rl.rollout.environments.config import HarnessSection
from fp8rl.rollout.environments.conversation import Conversation
from fp8rl.rollout.environments.harness import Harness
from fp8rl.rollout.environments.recording import parsers
from fp8rl.rollout.types import Group, Problem, Prompt, SamplingParams, Trajectory
from lab.bench.measure import Result

CONVERSATIONS, TURNS, TOKENS = 64, 6, 200
ENGINE_S = (0.5, 1.5)
BAR_MS = 5.0
_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
_CLIENT = """
import asyncio, json, sys, time
import aiohttp

async def converse(session, url, key, turns, tool):
    messages, times = [{"role": "user", "content": "9+4+5-8=?" * 20}], []
    for turn in range(turns):
        body = {"model": "policy", "messages": messages, "tools": [tool]}
        began = time.perf_counter()
        headers = {"Authorization": "Bearer " + key}
        async with session.post(url + "/chat/completions", json=body, headers=headers) as said:
            answer = await said.json()
        times.append(time.perf_counter() - began)
        messages += [answer["choices"][0]["message"], {"role": "tool", "tool_call_id": "x", "content": "13" * 50}]
    return times

async def main():
    asked = json.load(sys.stdin)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        every = [converse(session, asked["url"], key, asked["turns"], asked["tool"]) for key in asked["keys"]]
        print(json.dumps(await asyncio.gather(*every)))

asyncio.run(main())
"""


def run() -> list[Result]:
    tokenizer = AutoTokenizer.from_pretrained(Path("examples/models/tiny_qwen3_moe"))
    engine, client, cpu = asyncio.run(_measured(tokenizer))
    added = [1000 * (whole - own) for whole, own in zip(client, engine, strict=True)]
    return [
        Result(
            name=f"harness: ms that the endpoint adds to a request, {CONVERSATIONS} conversations at once, median",
            value=statistics.median(added),
            bar=BAR_MS,
            at_least=False,
            parts={
                "mean ms, all begin in one moment": statistics.fmean(added),
                "CPU ms a request": 1000 * cpu / len(added),
                "requests": len(added),
                "engine s, mean": statistics.fmean(engine),
            },
        )
    ]


async def _measured(tokenizer: PreTrainedTokenizerBase) -> tuple[list[float], list[float], float]:
    """Seconds of the engine and of the client for each request, in one order; CPU seconds of this process."""
    draws, keys = random.Random(0), asyncio.Queue[tuple[str, str, int]]()
    spent: dict[int, list[float]] = {}
    ended = asyncio.Event()

    async def sampler(group: Group, sampling: SamplingParams) -> Trajectory:
        began = time.perf_counter()
        await asyncio.sleep(draws.uniform(*ENGINE_S))
        ids = [10 + draws.randrange(80) for _ in range(TOKENS - 1)] + [tokenizer.eos_token_id]
        spent[group.prompt.problem.fields["number"]].append(time.perf_counter() - began)
        return Trajectory(group.prompt.token_ids, ids, [-1.0] * TOKENS, True, [0] * TOKENS, 0, group.seeds[0])

    async def program(base_url: str, api_key: str, problem: Problem) -> None:
        await keys.put((base_url, api_key, problem.fields["number"]))
        await ended.wait()

    parsers()  # a run imports them before it starts
    harness = Harness(HarnessSection(program="bench:program", tool_parser="qwen25"), program)
    sampling = SamplingParams(1 << 16, stop_token_ids=(tokenizer.eos_token_id,))
    running = []
    for number in range(CONVERSATIONS):
        spent[number] = []
        prompt = Prompt(Problem("?", "!", fields={"number": number}), [4])
        conversation = Conversation(prompt, number, sampling, sampler, tokenizer, timeout_s=600.0)
        running.append(asyncio.create_task(conversation.run(harness)))
    opened = sorted([await keys.get() for _ in range(CONVERSATIONS)], key=lambda each: each[2])
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CLIENT), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    asked = {"url": opened[0][0], "keys": [key for _, key, _ in opened], "turns": TURNS, "tool": _TOOL}
    began = time.process_time()
    output, _ = await client.communicate(json.dumps(asked).encode())
    cpu = time.process_time() - began
    ended.set()
    await asyncio.gather(*running)
    await harness.close()
    times: list[list[float]] = json.loads(output)
    return (
        [each for number in range(CONVERSATIONS) for each in spent[number]],
        [each for conversation in times for each in conversation],
        cpu,
    )
