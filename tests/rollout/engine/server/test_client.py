"""The client against a real server: keys, administration, updates."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from fp8rl.rollout.engine.engine import Engine
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.rollout.types import Endpoint, EngineError, SamplingParams
from fp8rl_certify.server import certify_server
from tests.support.planted_server import ask_little
from tests.support.servers import group_members, use


def test_an_answer_may_take_any_time_and_administration_may_not() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.5)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\nlate")
        await writer.drain()
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with EngineClient(Endpoint(f"http://127.0.0.1:{port}", "a", "b"), timeout_s=0.1) as client:
                with pytest.raises(EngineError, match="/generate answered 400: late"):
                    await client.complete([[1]], SamplingParams(max_new_tokens=8))
                with pytest.raises(httpx.ReadTimeout):
                    await client.flush()

    asyncio.run(run())


@pytest.mark.e2e
def test_greedy_answers_are_the_models_own(server: Engine, tiny_model: Path) -> None:
    import torch
    from transformers import Qwen3MoeForCausalLM

    prompts = [[11, 12, 13], [20, 21], [30]]
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0)
    completions = use(server.endpoint, lambda client: client.complete(prompts, sampling))
    model = Qwen3MoeForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).eval()
    for prompt, completion in zip(prompts, completions):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.token_ids])).logits[0].float()
        logprobs, said = logits.log_softmax(-1)[len(prompt) - 1 : -1], torch.tensor(completion.logprobs)
        own = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        for expected in (own, logprobs.amax(1)):  # each token is the most probable one, too
            torch.testing.assert_close(said, expected, atol=0.05, rtol=0)


@pytest.mark.e2e
def test_wrong_and_swapped_keys_are_refused(server: Engine) -> None:
    right = server.endpoint
    sampling = SamplingParams(max_new_tokens=1)
    assert right.api_key != right.admin_key and right.api_key not in repr(right) and right.admin_key not in repr(right)
    for key in ("wrong", right.admin_key):
        with pytest.raises(EngineError, match="401"):
            use(replace(right, api_key=key), lambda client: client.complete([[1]], sampling))
    actions: list[Callable[[EngineClient], Awaitable[Any]]] = [
        *(EngineClient.pause, EngineClient.resume, EngineClient.flush, EngineClient.report),
        lambda client: client.update_weights_from_disk("nowhere"),
        lambda client: client.load_bucket(["nowhere"], []),
        lambda client: client.commit(9),
    ]
    for action in actions:
        with pytest.raises(EngineError, match="401"):
            use(replace(right, admin_key=right.api_key), action)
    assert use(server.endpoint, lambda client: client.weight_version()) == 3


@pytest.mark.e2e
def test_no_key_leaks_and_what_no_run_needs_is_closed(server: Engine) -> None:
    """Not into the processes' command lines, their environment, the log, or what the generation key may read."""
    keys = (server.endpoint.api_key, server.endpoint.admin_key)
    for process in group_members(server.pid):
        shown = "\0".join(process.cmdline()) + "\0".join(process.environ().values())
        assert not any(key in shown for key in keys)
    log = server.log_path.read_text()
    assert not any(key in log for key in keys)
    generation = {"Authorization": f"Bearer {server.endpoint.api_key}"}
    for path in ("/server_info", "/get_server_info", "/model_info", "/health", "/openapi.json", "/v1/models"):
        assert server.endpoint.admin_key not in httpx.get(server.endpoint.url + path, headers=generation).text
    closed = ("/open_session", "/docs", "/openapi.json", "/server_info", "/v1/completions", "/")  # no run needs them
    for path in closed:
        for key in keys:
            for method in ("GET", "POST"):
                answer = httpx.request(method, server.endpoint.url + path, headers={"Authorization": f"Bearer {key}"})
                assert answer.status_code in (401, 404), answer.text


@pytest.mark.e2e
def test_what_the_engine_cannot_do_is_an_error_with_its_words(server: Engine, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="512|context|long"):
        use(server.endpoint, lambda client: client.complete([[1] * 600], SamplingParams(max_new_tokens=4)))
    with pytest.raises(EngineError, match="update_weights_from_disk"):
        use(server.endpoint, lambda client: client.update_weights_from_disk(tmp_path / "nothing"))
    assert use(server.endpoint, lambda client: client.weight_version()) == 3
    assert use(server.endpoint, lambda client: client.complete([[1]], SamplingParams(max_new_tokens=1)))


@pytest.mark.e2e
def test_weights_are_updated_from_disk_and_versions_follow(server: Engine, tiny_model: Path, other_model: Path) -> None:
    greedy = SamplingParams(max_new_tokens=16, temperature=0.0)

    async def update(client: EngineClient, model: Path, version: int) -> None:
        await client.pause()  # an answer is sent before its request is over, and an update under it ends SGLang
        await client.update_weights_from_disk(model)
        await client.flush()
        await client.admin("/update_weight_version", new_version=str(version), abort_all_requests=False)
        await client.resume()
        assert await client.weight_version() == version

    async def run(client: EngineClient) -> list[Any]:
        found: list[Any] = []
        for model, version in ((other_model, 4), (tiny_model, 5)):
            found.append((await client.complete([[9, 8, 7 + 1]], greedy))[0])
            await update(client, model, version)
        found.append((await client.complete([[9, 8, 7 + 1]], greedy))[0])
        await update(client, tiny_model, 3)
        return found

    before, changed, back = use(server.endpoint, run)
    assert [set(c.weight_versions) for c in (before, changed, back)] == [{3}, {4}, {5}]
    assert before.logprobs == back.logprobs and before.token_ids == back.token_ids
    assert before.logprobs != changed.logprobs


@pytest.mark.e2e
def test_a_stock_engine_is_broken_by_how_it_computes(server: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without our ops it is not exact, and `fp8rl certify` says so."""
    ask_little(monkeypatch)
    report = certify_server(server.endpoint.url, api_key=server.endpoint.api_key)
    assert report.verdict == "broken" and "prefill" in report.breaks, [(w.name, w.outcome, w.why) for w in report.ways]
    assert report.isolates and "not reached" not in {way.outcome for way in report.ways}
