"""What stands between clients of `fp8rl serve` and SGLang: its own request types, behind a real FastAPI application."""

import asyncio
import copy
import json
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from transformers import AutoTokenizer

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.files import changed_signature
from fp8rl.numerics.sampling import answer_seed
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin import state
from fp8rl.rollout.engine.server import public
from fp8rl.rollout.tasks.chat import end_ids, prompt_ids
from fp8rl.rollout.tasks.openai import read_request
from fp8rl.rollout.types import SamplingParams
from tests.support.blanks import tokenizer_with_blanks
from tests.support.chat_templates import KINDS, with_template
from tests.support.paths import EXAMPLES

protocol = pytest.importorskip("sglang.srt.entrypoints.openai.protocol")
Req = pytest.importorskip("sglang.srt.managers.schedule_batch").Req
sglang_params = pytest.importorskip("sglang.srt.sampling.sampling_params")
serving_base = pytest.importorskip("sglang.srt.entrypoints.openai.serving_base")
PATHS = ["/v1/completions", "/v1/chat/completions"]
USER: dict[str, Any] = {"role": "user", "content": "1"}
pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")  # of SGLang's errors


def _of(path: str) -> dict[str, Any]:
    """What an endpoint must be sent."""
    asked = {"prompt": "1"} if path == PATHS[0] else {"messages": [USER]}
    return {"model": "it"} | asked


@pytest.fixture(scope="module", autouse=True)
def configured() -> Iterator[None]:
    """As in a server of a model without adapters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "_state", None)
        state.configure(NumericsConfig(spec=QuantSpec.preset("bf16")))
        yield


@pytest.fixture(scope="module")
def client() -> TestClient:
    """Endpoints of SGLang's request types, which answer with what came through."""
    app = FastAPI()
    manager = SimpleNamespace(
        served_model_name="it",
        model_config=SimpleNamespace(vocab_size=10, context_len=64),
        tokenizer=AutoTokenizer.from_pretrained(EXAMPLES / "models/tiny_qwen3_moe"),
    )
    serving = SimpleNamespace(
        tokenizer_manager=manager,
        tool_call_parser=None,
        create_error_response=partial(serving_base.OpenAIServingBase.create_error_response, None),
    )

    async def through(serving: Any, request: Any, raw: Any) -> Any:
        return request.model_dump(include={"model", "seed", "n"}) | {"stops": request.stop_token_ids}

    @app.post(PATHS[0])
    async def complete(request: protocol.CompletionRequest, raw: Request) -> Any:
        return await public.answer(through, serving, request, raw)

    @app.post(PATHS[1])
    async def chat(request: protocol.ChatCompletionRequest, raw: Request) -> Any:
        return await public.answer(through, serving, request, raw)

    public.list_models(app, lambda: manager)
    return TestClient(app)


TOOLS = [{"type": "function", "function": {"name": "f"}}]
IMAGE = [{"type": "image_url", "image_url": {"url": "a.png"}}]
SAID = USER | {"role": "assistant", "thinking": "so"}


@pytest.mark.parametrize(
    ("paths", "change", "message"),
    [
        (PATHS, {"n": 0}, "n: found 0, expected 1 to 128"),
        (PATHS, {"seed": -1}, "seed: found -1, expected 0 to 9223372036854775807"),
        (PATHS, {"top_k": 2**31}, f"top_k: found {2**31}, expected -1 to {2**31 - 1}"),
        (PATHS, {"stop": ["a", ""]}, "stop: found an empty text, expected at least one character"),
        (PATHS, {"temprature": 0.0}, "temprature: is not served. Leave it out"),
        (PATHS, {"stop_token_ids": [1, 10]}, "stop_token_ids: found the token 10, expected 0 to 9"),
        (PATHS[:1], {"logprobs": -1}, "logprobs: found -1, expected 0 to 20"),
        (PATHS[:1], {"prompt": [10]}, "prompt: found the token 10, expected 0 to 9"),
        (PATHS[:1], {"prompt": [[1, 2], [3, -1]]}, "prompt: found the token -1, expected 0 to 9"),
        (PATHS[:1], {"response_format": {"type": "json_object"}}, "response_format: is not served. Leave it out"),
        (PATHS[1:], {"tools": TOOLS}, "tools: found tools, but no parser for tool calls, expected a server with"),
        (PATHS[1:], {"chat_template_kwargs": {"chat_template": "a"}}, "chat_template_kwargs: found chat_template, exp"),
        (PATHS[1:], {"input_ids": [10]}, "input_ids: is not served. Leave it out"),
        (PATHS[1:], {"messages": [USER | {"content": IMAGE}]}, "messages.0: content: found {'type': 'image_"),
        (PATHS[1:], {"messages": [USER | {"reasoning": "so"}]}, "messages.0: reasoning: found ['so'], expected one"),
        (PATHS[1:], {"messages": [SAID], "continue_final_message": True}, "continue_final_message: found more than"),
    ],
)
def test_what_would_be_answered_wrongly_is_refused(
    client: TestClient, paths: list[str], change: dict[str, Any], message: str
) -> None:
    for path in paths:
        answer = client.post(path, json=_of(path) | change)
        assert answer.status_code == 400 and answer.json()["message"].startswith(message)


def test_a_chat_may_ask_for_json_and_go_on_after_the_end_of_a_turn(client: TestClient) -> None:
    asked = _of(PATHS[1]) | {"response_format": {"type": "json_object"}, "stop_token_ids": [1]}
    ends = end_ids(AutoTokenizer.from_pretrained(EXAMPLES / "models/tiny_qwen3_moe"))
    assert client.post(PATHS[1], json=asked).json()["stops"] == [1, *ends]
    assert client.post(PATHS[1], json=asked | {"ignore_eos": True}).json()["stops"] == [1]


CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]
ASKED, LAST = {"role": "user", "content": [{"type": "text", "text": text} for text in "12"]}, {"role": "assistant"}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "D"}, ASKED],
        [ASKED, {**LAST, "content": None, "reasoning": "so", "tool_calls": CALLS}, {"role": "tool", "content": "3"}],
        [ASKED, {**LAST, "content": "4", "thinking": "so", "name": "n"}],
        [{**ASKED, "name": "me"}],
        [ASKED, {"role": "developer", "content": "D"}, {**LAST, "content": "5"}],
    ],
)
def test_a_chat_has_the_prompt_that_a_program_has_in_training(messages: list[Any]) -> None:
    plain = with_template(AutoTokenizer.from_pretrained(EXAMPLES / "models/tiny_qwen3_moe"), KINDS["qwen3"])
    plain.chat_template = "{{ tools | tojson }}" + plain.chat_template + "{{ messages[0].name }}"
    tools = [{"type": "function", "function": {"name": name, "parameters": {}, "description": "d"}} for name in "fg"]
    for further in ({}, {"tools": tools}):
        body = json.dumps({"model": "policy", "messages": messages, **further}).encode()
        asked = read_request(body, True, SamplingParams(9), (), 9)
        expected = prompt_ids(plain, asked.messages, {"tools": list(asked.tools)} if asked.tools else {})
        given = {"messages": messages, **further}
        public._sent.set(given | {"messages": list(asked.messages)})
        serving = SimpleNamespace(tokenizer_manager=SimpleNamespace(tokenizer=plain))
        request = protocol.ChatCompletionRequest.model_validate(given)
        found = public.write_chat(serving, request, [tool.model_dump() for tool in request.tools or []] or None, False)
        assert found.prompt_ids == expected


@pytest.mark.parametrize("path", PATHS)
def test_what_is_right_comes_through_whole(client: TestClient, path: str) -> None:
    neutral = {"response_format": {"type": "text"}, "logit_bias": None, "top_k": -1, "stop": [], "user": "somebody"}
    answer = client.post(path, json=_of(path) | neutral | {"seed": 2**63 - 1, "n": 3})
    assert answer.json() | {"stops": None} == {"model": "it", "seed": 2**63 - 1, "n": 3, "stops": None}
    for prompt in ("99", ["99", "é"], [9, 0], [[9], [0]]):
        assert client.post(PATHS[0], json=_of(PATHS[0]) | {"prompt": prompt}).status_code == 200


def test_each_answer_to_a_prompt_gets_a_seed_of_its_own() -> None:
    from sglang.srt.sampling.sampling_params import SamplingParams

    def sent(manager: Any, parameters: Any, times: int) -> list[int]:
        requests = [SimpleNamespace(sampling_params=parameters) for _ in range(times)]
        for request in requests:
            public.seed_each_answer(manager, request)
        return [request.sampling_params.sampling_seed for request in requests]

    manager, parameters = SimpleNamespace(), SamplingParams(n=3, sampling_seed=7)
    expected = [answer_seed(7, 0, 0, answer) for answer in range(3)]
    assert sent(manager, parameters, 3) == expected and len(set(expected)) == 3
    assert sent(manager, copy.copy(parameters), 3) == expected, "the next prompt's"
    assert parameters.sampling_seed == 7
    assert sent(manager, SamplingParams(n=1, sampling_seed=7), 2) == [7, 7]
    assert sent(manager, SamplingParams(n=3), 3) == [None, None, None]


def test_the_base_beside_adapters_is_a_model_of_its_own(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def models() -> list[str]:
        return [model["id"] for model in client.get("/v1/models").json()["data"]]

    asked = _of(PATHS[0]) | {"model": "it-base"}
    refused = client.post(PATHS[0], json=asked)
    assert models() == ["it"] and refused.status_code == 404
    assert refused.json()["message"] == "The model 'it-base' does not exist; this server has 'it'."
    monkeypatch.setattr(state.state(), "base_name", "it-base")
    assert models() == ["it", "it-base"]
    assert client.post(PATHS[0], json=asked).json()["model"] == "it-base"
    message = client.post(PATHS[0], json=asked | {"model": "base"}).json()["message"]
    assert message == "The model 'base' does not exist; this server has 'it' and 'it-base'."


@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("answers", [1, 3])
def test_each_answer_of_the_base_goes_without_the_adapters(
    monkeypatch: pytest.MonkeyPatch, prompts: int, answers: int
) -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    monkeypatch.setattr(state.state(), "base_name", "it-base")
    for model, expected in (("it", None), ("it-base", "it-base")):
        path = public.name_base(None, model, None)
        sampling = {"n": answers}
        text = ["1"] * prompts if prompts > 1 else "1"
        asked = GenerateReqInput(text=text, lora_path=path, sampling_params=sampling)
        asked.normalize_batch_and_arguments()
        early = None if asked.is_single else asked[0]
        asyncio.run(public.mark_base(None, asked))
        found = [asked] if asked.is_single else [early, *(asked[i] for i in range(prompts * answers))]
        assert {each.lora_id for each in found} == {expected}


def test_prompts_begin_with_one_bos_and_an_answer_s_beginning_goes_on_as_the_whole() -> None:
    tokenizer = tokenizer_with_blanks("prepend")
    manager = SimpleNamespace(tokenizer=tokenizer)
    begun = [1, *tokenizer("[INST]", add_special_tokens=False).input_ids]
    assert asyncio.run(public.begin_once(manager, "[INST]")) == (begun, None)
    assert asyncio.run(public.begin_once(manager, ["<s>[INST]", "[INST]"])) == ([begun] * 2, None)
    tokenizer.chat_template = "<s>[INST]"
    for prefix in ("3", " 3"):
        messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": prefix}]
        public._sent.set({"messages": messages})
        request = SimpleNamespace(chat_template_kwargs=None, continue_final_message=True, stop=None)
        found = public.write_chat(SimpleNamespace(tokenizer_manager=manager), request, None, False)
        assert found.prompt_ids == tokenizer("<s>[INST]" + prefix, add_special_tokens=False).input_ids


def test_a_stop_is_found_in_however_many_tokens_the_model_writes_it() -> None:
    tokenizer, sampling = tokenizer_with_blanks("first"), sglang_params.SamplingParams(stop=" =")
    sampling.normalize(tokenizer)
    public.watch_whole_stops(None, sampling, tokenizer)
    request = Req.__new__(Req)
    request.sampling_params, request.tokenizer, request.decoded_text = sampling, tokenizer, ""
    for tokens in (["x", "▁="], ["x", "▁", "="]):  # the first is how the stop is tokenized
        request.output_ids = tokenizer.convert_tokens_to_ids(tokens)
        assert request._check_str_based_finish(), tokens


def test_offsets_count_the_characters_before() -> None:
    found = protocol.LogProbs(tokens=["12", "é", "\n"], text_offset=[-1, -1, -1])
    assert public.with_offsets(found).text_offset == [0, 2, 3]
    assert public.with_offsets(protocol.LogProbs()).text_offset == []


def test_every_target_is_as_it_is_expected() -> None:
    assert not [problem for hook in public.HOOKS if (problem := changed_signature(hook.path, hook.parameters))]
