"""Programs of others that speak OpenAI's API, with a model whose lines are given: what is recorded of them."""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
import re
import sys
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest

import fp8rl.rollout.tasks.environments.harness as harness_module
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import load_experiment
from fp8rl.rollout.tasks.environments import EnvironmentSection, HarnessSection
from fp8rl.rollout.tasks.environments.conversation import Conversation
from fp8rl.rollout.tasks.environments.functions import load_environment
from fp8rl.rollout.tasks.environments.harness import Harness, ProgramEndpoint, ProgramError
from fp8rl.rollout.tasks.openai import read_request
from fp8rl.rollout.types import Problem, Prompt, SamplingParams, Trajectory
from tests.support.conversations import EOS, Model, ids

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
USER = {"role": "user", "content": "1+2=?"}
SHORT_OF_ROOM = "no room is left for an answer"

HARNESS = HarnessSection.model_validate({"program": "x:y"})
Agent = Callable[[openai.AsyncOpenAI], Any]


def harness_of(**settings: Any) -> Harness:
    """As a spec has it."""
    harness = load_environment(EnvironmentSection(function="harness", harness=settings))  # type: ignore[arg-type]
    assert isinstance(harness, Harness)
    return harness


def played(
    tokenizer: Any, agent: Agent | Harness, *lines: str, room: int = 200, **settings: Any
) -> tuple[Any, list[Trajectory], Model]:
    """What an agent returned in a conversation with these lines of the model, its rows, and the model."""
    model = Model(tokenizer, *lines)
    prompt = Prompt(Problem("1+2=?", "#### 3"), tokenizer("1+2=?", add_special_tokens=False).input_ids)
    sampling = SamplingParams(room, stop_token_ids=(tokenizer.eos_token_id,))

    async def program(base_url: str, api_key: str, problem: Problem) -> Any:
        assert not isinstance(agent, Harness)
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            return await agent(client)

    async def run() -> tuple[Any, list[Trajectory]]:
        config = HarnessSection.model_validate({"program": "x:y", **settings})
        harness = agent if isinstance(agent, Harness) else Harness(config, program)
        conversation = Conversation(prompt, 7, sampling, model, tokenizer, timeout_s=10.0, longest=1000)
        try:
            returned = await conversation.run(harness)
        finally:
            await harness.close()
        return returned, conversation.trajectories({})

    return *asyncio.run(run()), model


def sampled(rows: list[Trajectory]) -> int:
    return sum(len(row.logprobs) for row in rows)


@pytest.mark.slow
def test_three_turns_with_tools_are_one_row_in_which_nothing_is_tokenized_twice(tokenizer: Any) -> None:
    async def agent(client: openai.AsyncOpenAI) -> float:
        messages: list[Any] = [USER]
        for number in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])  # type: ignore[list-item]
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                assert (answer.choices[0].finish_reason, message.content) == ("stop", "#### 3")
                return 1.0
            (call,) = message.tool_calls
            assert (call.id, answer.choices[0].finish_reason) == (f"call0000{number}", "tool_calls")
            assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        return 0.0

    lines = (CALL + EOS, CALL + EOS, "#### 3" + EOS)
    reward, rows, model = played(tokenizer, agent, *lines, tool_parser="qwen25", room=400)
    (row,) = rows
    assert reward == 1.0 and row.branch == 0
    assert row.prompt_ids == ids(tokenizer, "<|user|>1+2=?<|assistant|>")
    between = "<|tool|>3<|assistant|>"
    assert row.token_ids == ids(tokenizer, CALL + EOS + between + CALL + EOS + between + "#### 3" + EOS)
    assert [tokenizer.decode(row.token_ids[a:b]) for a, b in row.environment_spans] == [between] * 2
    assert row.logprobs == [-float(t) for t in ids(tokenizer, CALL + EOS + CALL + EOS + "#### 3" + EOS)]
    count = len(ids(tokenizer, CALL)) + 1
    assert row.weight_versions == [1] * count + [2] * count + [3] * 7
    assert [prompt for prompt, _, _ in model.asked][2] == row.prompt_ids + row.token_ids[:-7]


def test_a_history_that_is_changed_is_a_row_of_its_own_from_the_recorded_tokens_that_it_shares(tokenizer: Any) -> None:
    async def agent(client: openai.AsyncOpenAI) -> None:
        first = await say(client, [USER])
        history: list[Any] = [USER, {"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
        second = await say(client, history)
        assert (first, second) == ("4", "5")
        await say(client, [*history, {"role": "assistant", "content": "edited"}, {"role": "user", "content": "again"}])
        await say(client, [{"role": "system", "content": "compact"}, USER])
        assert await say(client, [*history, {"role": "assistant", "content": second}, USER]) == "8"

    _, rows, model = played(tokenizer, agent, "4" + EOS, "5" + EOS, "6" + EOS, "7" + EOS, "8" + EOS)
    by_prompt = {tokenizer.decode(row.prompt_ids): tokenizer.decode(row.token_ids) for row in rows}
    begun = "<|user|>1+2=?<|assistant|>"
    assert by_prompt == {
        begun: "4<|im_end|><|user|>more<|assistant|>5<|im_end|><|user|>1+2=?<|assistant|>8<|im_end|>",
        begun + "4<|im_end|><|user|>more<|assistant|>edited<|im_end|><|user|>again<|assistant|>": "6<|im_end|>",
        "<|system|>compact<|user|>1+2=?<|assistant|>": "7<|im_end|>",
    }
    assert sampled(rows) == 10, "each token that was sampled stands in one row, as one to be learnt"
    assert tokenizer.decode(rows[0].token_ids).endswith("8<|im_end|>") and [row.branch for row in rows] == [0, 1, 2]
    assert len({row.seed for row in rows}) == 3 and {seed for _, seed, _ in model.asked} == {row.seed for row in rows}


async def say(client: openai.AsyncOpenAI, messages: list[Any], **settings: Any) -> str:
    answer = await client.chat.completions.create(model="policy", messages=messages, **settings)
    return answer.choices[0].message.content or ""


def test_a_stream_brings_the_same_and_one_that_is_abandoned_is_recorded(tokenizer: Any) -> None:
    async def agent(client: openai.AsyncOpenAI) -> str:
        streamed: dict[str, Any] = {"stream": True, "tools": [TOOL], "stream_options": {"include_usage": True}}
        stream = await client.chat.completions.create(model="policy", messages=[USER], **streamed)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(ids(tokenizer, CALL)) + 1
        calls = [c for chunk in chunks for choice in chunk.choices for c in choice.delta.tool_calls or ()]
        assert [(c.function.name, c.id) for c in calls if c.function] == [("add", "call00000")]
        abandoned = await client.chat.completions.create(model="policy", messages=[USER], stream=True)
        await abandoned.close()
        return "done"

    _, rows, _ = played(tokenizer, agent, CALL + EOS, "9" + EOS, tool_parser="qwen25", room=400)
    assert sampled(rows) == len(ids(tokenizer, CALL)) + 1 + 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "status", "message"),
    [
        ({"model": "gpt-5"}, 404, "The model 'gpt-5' does not exist; a run serves 'policy'"),
        ({"extra_body": {"best_of": 2}}, 400, "best_of: is not supported"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, 400, "messages.0: found the role ['user'], expected"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content: found {'type': 'image_"),
        ({"temperature": 0.2}, 400, "temperature: found 0.2, expected 1.0, as in the run"),
        ({"tools": [TOOL]}, 400, "expected environment.harness.tool_parser to be set"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools.0.type: found 'web_search'. Input should be 'function'"),
        ({"tool_choice": {"type": "function"}}, 400, "or add tool_choice to environment.harness.override"),
        ({"messages": [{"role": "user", "content": "1" * 1000}]}, 400, "no room is left for an answer"),
    ],
)
def test_a_request_that_cannot_be_answered_as_asked_is_refused_in_one_sentence(
    tokenizer: Any, settings: dict[str, Any], status: int, message: str
) -> None:
    async def agent(client: openai.AsyncOpenAI) -> float:
        with pytest.raises(openai.APIStatusError, match=re.escape(message)) as caught:
            await client.chat.completions.create(**({"model": "policy", "messages": [USER]} | settings))
        assert caught.value.status_code == status
        assert await say(client, [USER], temperature=1.0, top_p=1.0) == "3", "the conversation goes on"
        return 1.0

    returned, rows, _ = played(tokenizer, agent, "3" + EOS)
    assert returned == 1.0 and sampled(rows) == 2


ASKED = json.dumps({"model": "policy", "messages": [USER]}).encode()


@pytest.mark.parametrize(
    ("body", "encoding", "message"),
    [
        (gzip.compress(ASKED, mtime=0), "gzip", ""),
        (gzip.compress(b" " * (40 << 20), mtime=0), "gzip", SHORT_OF_ROOM),
        (b" " * (33 << 20), "identity", SHORT_OF_ROOM),
        (b'{"model": "policy", "messages": [{"role": "user", "content": "%s"}]}' % (b"1" * 100_000), "", SHORT_OF_ROOM),
    ],
)
def test_a_body_counts_as_what_it_is_unpacked(tokenizer: Any, body: bytes, encoding: str, message: str) -> None:
    async def program(base_url: str, api_key: str, problem: Problem) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {api_key}"} | ({"Content-Encoding": encoding} if encoding else {})
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{base_url}/chat/completions", data=body, headers=headers) as answer:
                return answer.status, await answer.json()

    (status, said), _, model = played(tokenizer, Harness(HARNESS, program), "3" + EOS)
    if message:
        assert status == 400 and said["error"]["type"] == "invalid_request_error"
        assert message in said["error"]["message"] and not model.asked
    else:
        assert status == 200 and said["choices"][0]["message"]["content"] == "3"


def test_a_long_text_is_tokenized_beside_the_other_conversations_all_of_which_find_the_endpoint(tokenizer: Any) -> None:
    others_are_done, slow, found = threading.Event(), copy.copy(tokenizer), set[str]()

    def waits(messages: Any, **options: Any) -> Any:
        assert len(messages[-1]["content"]) < 1000 or others_are_done.wait(10)
        return tokenizer.apply_chat_template(messages, **options)

    slow.apply_chat_template = waits

    async def program(base_url: str, api_key: str, problem: Problem) -> None:
        found.add(base_url)
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            await say(client, [{"role": "user", "content": problem.question}])

    async def run() -> None:
        harness, sampling = Harness(HARNESS, program), SamplingParams(8, stop_token_ids=(tokenizer.eos_token_id,))

        async def one(question: str) -> None:
            prompt, model = Prompt(Problem(question, "!"), [4]), Model(tokenizer, "3" + EOS)
            await Conversation(prompt, 7, sampling, model, slow, 10.0, longest=100_000).run(harness)

        begun = asyncio.create_task(one("1" * 80_000))
        await asyncio.gather(*(one("1") for _ in range(8)))
        others_are_done.set()
        await begun
        await harness.close()

    asyncio.run(run())
    assert len(found) == 1 and found.pop().startswith("http://127.0.0.1:")


def test_a_program_gets_nothing_but_its_own_conversation(tokenizer: Any) -> None:
    async def agent(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.AuthenticationError, match="found no key of an active conversation"):
            await say(client.with_options(api_key="another"), [USER])
        with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings: Not Found"):
            await client.embeddings.create(model="policy", input="1")
        await say(client, [USER], stop=["1", EOS])  # the end of turn is no stop, so rewards do not read it
        await client.completions.create(model="policy", prompt="1", max_tokens=150)
        for most in (9, 4):
            said = await client.completions.create(model="policy", prompt="1+2=", stop=["++"], max_tokens=most)
            assert (said.choices[0].text, said.choices[0].finish_reason) == ("12", "stop")

    counted, decoded = copy.copy(tokenizer), list[int]()
    counted.decode = lambda ids, **options: decoded.append(len(ids)) or tokenizer.decode(ids, **options)
    rows = played(counted, agent, "3" + EOS, "7" * 150, *["12++77" + EOS] * 2)[1]
    assert sorted(row.stopped for row in rows) == [False, False, False, True]
    assert sum(decoded) < 20 * 150, "a long completion is not decoded once for each of its tokens"


def test_requests_without_end_are_refused_and_settings_that_are_overridden_are_not_heard(tokenizer: Any) -> None:
    async def agent(client: openai.AsyncOpenAI) -> None:
        await say(client, [USER], temperature=0.1)
        with pytest.raises(openai.RateLimitError, match="found more than 1 requests"):
            await say(client, [USER])

    _, _, model = played(tokenizer, agent, "3" + EOS, max_requests=1, override=("temperature",))
    assert model.asked[0][2].temperature == 1.0
    for forced in ("required", {"type": "function", "function": {"name": "add"}}):  # smolagents sends `required`
        body = json.dumps({"model": "policy", "messages": [USER], "tools": [TOOL], "tool_choice": forced})
        assert read_request(body.encode(), True, SamplingParams(8), ("tool_choice",), vocabulary=128).may_call


def test_a_program_that_fails_for_want_of_room_has_come_to_the_end_of_its_answer(tokenizer: Any) -> None:
    async def agent(client: openai.AsyncOpenAI) -> float:
        long = {"role": "user", "content": "1" * 40}
        history: list[Any] = [USER, {"role": "assistant", "content": await say(client, [USER])}]
        with pytest.raises(openai.BadRequestError, match=SHORT_OF_ROOM):
            await say(client, [*history, long])
        assert await say(client, [*history, USER]) == "4", "a shorter message has room"
        await say(client, [*history, USER, {"role": "assistant", "content": "4"}, long])
        return 1.0

    returned, (row,), _ = played(tokenizer, agent, "3" + EOS, "4" + EOS, room=40)
    assert returned is None and not row.finished and sampled([row]) == 4


@pytest.mark.slow
def test_a_program_that_never_ends_is_ended_in_time_or_with_the_error_of_an_engine_that_is_lost(tokenizer: Any) -> None:
    async def agent(client: openai.AsyncOpenAI) -> None:
        while True:
            with suppress(openai.InternalServerError):
                await say(client, [USER])
                await asyncio.sleep(600)

    with pytest.raises(IndexError):
        played(tokenizer, agent)  # a model without a line
    with pytest.raises(ProgramError, match="the program took more than 0.5 s"):
        played(tokenizer, agent, "3" + EOS, deadline_s=0.5)


AGENT = """
import json, os, sys
import urllib.request
problem = json.load(sys.stdin)
assert set(problem) == {"question", "messages", "fields"} and "FP8RL_SECRET" not in os.environ
def say(messages):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
said = say(problem["messages"])
print("thinking")
END
print(json.dumps({"reward": float(said["content"] == "3"), "turns": 1}))
"""
SLEEPS = """import subprocess
child = subprocess.Popen(['sleep', '600'])
open('child', 'w').write(str(child.pid))
child.wait()"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("", {"reward": 1.0, "turns": 1}),
        ("raise SystemExit('no luck')", "ended with status 1: no luck"),
        (SLEEPS, "the program took more than 3 s (environment.harness.deadline_s)"),
    ],
)
def test_a_command_is_a_process_of_its_own_that_may_die_and_is_ended_in_time(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, expected: Any
) -> None:
    """A proxy of the environment, whose variables it may be given, is not asked for the endpoint."""
    (tmp_path / "agent.py").write_text(AGENT.replace("END", end))
    monkeypatch.setenv("FP8RL_SECRET", "x")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    harness = harness_of(
        command=[sys.executable, "-I", "-S", str(tmp_path / "agent.py")],
        deadline_s=3.0 if end is SLEEPS else 60.0,
        directory=str(tmp_path),
        variables=["HTTP_PROXY"],
    )
    if isinstance(expected, dict):
        assert played(tokenizer, harness, "3" + EOS)[0] == expected
    else:
        with pytest.raises(ProgramError) as caught:
            played(tokenizer, harness, "3" + EOS)
        assert expected in str(caught.value)
    if end is SLEEPS:
        assert not psutil.pid_exists(int((tmp_path / "child").read_text())), "it is ended with all that it has started"


@pytest.mark.slow
def test_a_command_that_says_much_takes_no_memory_of_the_run(tokenizer: Any) -> None:
    def command(code: str) -> Harness:
        return harness_of(command=[sys.executable, "-I", "-S", "-c", "import sys, time\n" + code])

    told = "for _ in range(64):\n    sys.stdout.write('x' * 2**20 + '\\n'); sys.stderr.write('y' * 2**16 + '\\n')\n"
    tracemalloc.start()
    try:
        assert played(tokenizer, command(told + "print(0.5)"))[0] == 0.5
        assert tracemalloc.get_traced_memory()[1] < 8 << 20, "of 68 MiB that were said"
    finally:
        tracemalloc.stop()
    with pytest.raises(ProgramError, match="yyy\nno such thing$") as caught:
        played(tokenizer, command(told + "sys.exit('no such thing')"))
    assert len(str(caught.value)) < 5000


def test_a_program_with_a_slash_is_a_path_of_the_spec_and_a_refusal_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, spec = tmp_path / "specs/bin/agent", {"model": {"path": "m"}, "data": {"train": "d"}}
    agent.parent.mkdir(parents=True)
    agent.write_text("#!/bin/sh\n")
    spec["environment"] = {"function": "harness", "harness": {"command": ["bin/agent", "a/b.py"]}}
    (tmp_path / "specs/spec.yaml").write_text(json.dumps(spec))
    monkeypatch.chdir(tmp_path)

    def loaded(*overrides: str) -> Any:
        section = load_experiment("specs/spec.yaml", overrides).environment
        return section.harness.command, load_environment(section)  # type: ignore[union-attr]

    with pytest.raises(UserError, match=f"command: found '?{agent}.*expected a program that can be run"):
        loaded()
    agent.chmod(0o700)
    command, harness = loaded()
    assert command == (str(agent), "a/b.py") and isinstance(harness, Harness)
    for program, said in (
        ("bin/agent", f"found '{tmp_path}/bin/agent', expected a program that can be run"),
        ("./specs/bin", f"found '{tmp_path}/specs/bin', expected a program that can be run"),
        ("no_such_agent", "found 'no_such_agent', expected a program that can be run, by its path or in PATH"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            loaded(f"environment.harness.command=[{program}]")


@pytest.mark.slow
def test_headers_that_drip_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind an answer."""
    monkeypatch.setattr(harness_module, "_HEADERS_S", 0.3)

    async def dripped() -> None:
        endpoint = ProgramEndpoint(())
        await endpoint.open()
        port = int(endpoint.url.rpartition(":")[2].removesuffix("/v1"))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"401" in await reader.readline()
        await reader.readuntil(b"}}")
        async with asyncio.timeout(5):
            with suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b"G")
                    with suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(1), 0.05)
        writer.close()
        await endpoint.close()

    asyncio.run(dripped())
