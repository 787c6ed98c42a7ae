"""What stands between clients of `fp8rl serve` and SGLang: its own request types, behind a real FastAPI application."""

import asyncio
import copy
import json
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.testclient import TestClient
from transformers import AutoTokenizer

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.sampling import answer_seed
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin import state
from fp8rl.rollout.engine.plugin.hooks import _problem
from fp8rl.rollout.engine.server import public
from fp8rl.rollout.tasks.chat import prompt_ids
from fp8rl.rollout.tasks.openai import read_request
from fp8rl.rollout.types import SamplingParams
from tests.support.blanks import tokenizer_with_blanks
from tests.support.chat_templates import KINDS, with_template
from tests.support.paths import EXAMPLES

protocol = pytest.importorskip("sglang.srt.entrypoints.openai.protocol")
Req = pytest.importorskip("sglang.srt.managers.schedule_batch").Req
sglang_params = pytest.importorskip("sglang.srt.sampling.sampling_params")
add_api_key_middleware = pytest.importorskip("sglang.srt.utils.auth").add_api_key_middleware
ODD = [b'{"model": "it", "prompt": "1", "temperature": %s}' % number for number in (b"NaN", b"1e400", b"9" * 5000)]
ODD.append(rb'{"model": "it", "prompt": "\ud800", "messages": [{"role": "user", "content": "\ud800"}]}')
PATHS = ["/v1/completions", "/v1/chat/completions"]
KEY = "secret"
pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")  # of SGLang, to a wrong key


def _of(path: str) -> dict[str, Any]:
    """What an endpoint must be sent."""
    asked = {"prompt": "1"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "1"}]}
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
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "models/tiny_qwen3_moe")
    tokenizer.ends = (7, 8)
    manager = SimpleNamespace(
        served_model_name="it", model_config=SimpleNamespace(vocab_size=10, context_len=64), tokenizer=tokenizer
    )

    async def through(serving: Any, request: Any, raw: Any) -> Any:
        return request.model_dump(include={"model", "seed", "n"}) | {"stops": request.stop_token_ids}

    @app.post(PATHS[0])
    async def complete(request: protocol.CompletionRequest) -> Any:
        return await public.answer(through, SimpleNamespace(tokenizer_manager=manager), request, None)

    @app.post(PATHS[1])
    async def chat(request: protocol.ChatCompletionRequest) -> Any:
        serving = SimpleNamespace(tokenizer_manager=manager, tool_call_parser=None)
        return await public.answer(through, serving, request, None)

    public.open_models(app, lambda: manager)
    app.add_exception_handler(RequestValidationError, public.invalid)
    app.add_middleware(public.ObjectsOnly)
    add_api_key_middleware(app, api_key=KEY, admin_api_key="another")
    public.one_form(None, app)
    return TestClient(app, raise_server_exceptions=False, headers={"Authorization": f"Bearer {KEY}"})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body", [b"null", b"[]", b"5", b"", b'{"model": ', b"\xff\xfe", b"[" * 100_000, b"[" * 200 + b"]" * 200, *ODD]
)
def test_a_body_that_is_no_object_is_refused_in_one_form(client: TestClient, path: str, body: bytes) -> None:
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith("body: found ")
    assert error.keys() == {"message", "type", "param", "code"} and "/" not in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "gpt-4"}, 404, "The model 'gpt-4' does not exist; this server has 'it'."),
        ({"model": None}, 400, "model: Input should be a valid string"),
        ({"n": 0}, 400, "n: found 0, expected 1 to 128"),
        ({"n": "many"}, 400, "n: Input should be a valid integer, unable to parse string as an integer"),
        ({"seed": -1}, 400, "seed: found -1, expected 0 to 9223372036854775807"),
        ({"seed": 2**63}, 400, f"seed: found {2**63}, expected 0 to 9223372036854775807"),
        ({"logit_bias": {"1": 1.0}}, 400, "logit_bias: is not served. Leave it out"),
        ({"temprature": 0.0}, 400, "temprature: is not served. Leave it out"),
        ({"rid": ["a", "b"]}, 400, "rid: is not served. Leave it out"),
        ({"stop": ["a", ""]}, 400, "stop: found an empty text, expected at least one character in each"),
        ({"stop_token_ids": [1, 10]}, 400, "stop_token_ids: found 10, expected 0 to 9"),
        ({"cache_salt": ["a", "b"]}, 400, "cache_salt: found another value, expected a text of at most 256 characters"),
        ({"top_k": 2**31}, 400, f"top_k: found {2**31}, expected 1 to {2**31 - 1}, or -1 for all"),
        ({"stop": "a" * 40_000}, 400, "stop: found 40002 characters, expected at most 32768"),
        ({"top_k": -7}, 400, f"top_k: found -7, expected 1 to {2**31 - 1}, or -1 for all"),
    ],
)
def test_what_would_be_answered_wrongly_is_refused(
    client: TestClient, path: str, change: dict[str, Any], status: int, message: str
) -> None:
    answer = client.post(path, json=_of(path) | change)
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, message)


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (PATHS[0], {"response_format": {"type": "json_object"}}, "response_format: is not served. Leave it out"),
        (PATHS[0], {"tools": TOOLS}, "tools: is not served. Leave it out"),
        (PATHS[1], {"tools": TOOLS * 12_000}, "tools: found 588000 characters, expected at most 524288"),
        (
            PATHS[1],
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a" * 8] * 100_000}}}},
            "response_format: found 1200062 characters, expected at most 32768",
        ),
        (
            PATHS[0],
            {"echo": True, "logprobs": 0},
            "logprobs: found 0 with echo, expected 1 to 20, as SGLang gives those of a prompt with the most probable",
        ),
        (
            PATHS[1],
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}]},
            "messages.0.content: found 'image_url', expected text alone",
        ),
        (
            PATHS[1],
            {"tools": TOOLS},
            "tools: found some, expected a server that knows the format in which the model calls them: --tool-parser",
        ),
        (
            PATHS[1],
            {"response_format": "json"},
            "response_format: found json, expected an object whose type is text, json_object, json_schema",
        ),
        (
            PATHS[1],
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
            "response_format: found {'type': 'structural_tag', 'structures': [], 'triggers': []}, expected an object "
            "whose type is text, json_object, json_schema",
        ),
    ],
)
def test_tools_and_forms_are_of_chats_alone(
    client: TestClient, path: str, change: dict[str, Any], message: str
) -> None:
    answer = client.post(path, json=_of(path) | change)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_a_chat_may_ask_for_json_and_go_on_after_the_end_of_a_turn(client: TestClient) -> None:
    asked = _of(PATHS[1]) | {"response_format": {"type": "json_object"}, "stop_token_ids": [1]}
    assert client.post(PATHS[1], json=asked).json()["stops"] == [1, 7, 8]
    assert client.post(PATHS[1], json=asked | {"ignore_eos": True}).json()["stops"] == [1]


@pytest.mark.parametrize(
    ("method", "path", "key", "status", "code"),
    [
        ("POST", PATHS[1], "wrong", 401, "invalid_api_key"),
        ("GET", "/v1/models", "", 401, "invalid_api_key"),
        ("GET", "/v1/embeddings", KEY, 404, "unknown_url"),
        ("POST", "/", KEY, 404, "unknown_url"),
        ("GET", PATHS[1], KEY, 405, "method_not_allowed"),
        ("GET", "/v1/models/other", KEY, 404, "model_not_found"),
    ],
)
def test_a_wrong_key_and_an_unknown_path_are_refused_in_one_form(
    client: TestClient, method: str, path: str, key: str, status: int, code: str
) -> None:
    answer = client.request(method, path, headers={"Authorization": f"Bearer {key}"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"


CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]
ASKED, LAST = {"role": "user", "content": [{"type": "text", "text": text} for text in "12"]}, {"role": "assistant"}


@pytest.mark.parametrize("content_format", ["string", "openai"])
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
def test_a_chat_has_the_prompt_that_a_program_has_in_training(messages: list[Any], content_format: str) -> None:
    """Through SGLang's own request types and its way to the template, but for what the server computes."""
    chat = pytest.importorskip("sglang.srt.entrypoints.openai.serving_chat")
    plain = with_template(AutoTokenizer.from_pretrained(EXAMPLES / "models/tiny_qwen3_moe"), KINDS["qwen3"])
    plain.chat_template = "{{ tools | tojson }}" + plain.chat_template + "{{ messages[0].name }}"
    tools = [{"type": "function", "function": {"name": name, "parameters": {}, "description": "d"}} for name in "fg"]
    for further in ({}, {"tools": tools}):
        asked = read_request(
            json.dumps({"model": "policy", "messages": messages, **further}).encode(), True, SamplingParams(9), (), 9
        )
        expected = prompt_ids(plain, asked.messages, {"tools": list(asked.tools)} if asked.tools else {})
        request = protocol.ChatCompletionRequest.model_validate(public._as_read({"messages": messages, **further}))
        manager = SimpleNamespace(tokenizer=public.render_as_trained(copy.deepcopy(plain)))
        serving = SimpleNamespace(
            template_manager=SimpleNamespace(jinja_template_content_format=content_format, reasoning_config=None),
            chat_encoding_spec=None,
            _encode_messages=lambda *_, **__: None,
            _handle_last_assistant_message=partial(chat.OpenAIServingChat._handle_last_assistant_message, None),
            _tokenizer_auto_adds_specials=True,
            tokenizer_manager=manager,
        )
        dumped = [tool.model_dump() for tool in request.tools or []] or None
        found = chat.OpenAIServingChat._apply_jinja_template(serving, request, dumped, False)
        assert found.prompt_ids == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": "human"}, "messages.0: found the role 'human', expected system, developer, user, assistant, tool"),
        ({"reasoning": "so"}, "messages.0: reasoning: found ['so'], expected one text, in an assistant's message. "),
        (
            {"role": "assistant", "thinking": "so"},
            "continue_final_message: found more than a content in the last message, expected that alone",
        ),
    ],
)
def test_what_would_be_left_out_of_a_chat_is_refused(client: TestClient, change: dict[str, Any], message: str) -> None:
    asked = _of(PATHS[1]) | {"messages": [{"role": "user", "content": "1", **change}], "continue_final_message": True}
    answer = client.post(PATHS[1], json=asked)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(message)


def test_numbers_that_would_end_the_engine_are_refused(client: TestClient) -> None:
    for change, message in (
        ({"logprobs": -1}, "logprobs: found -1, expected 0 to 20"),
        ({"prompt": [[1], []]}, "prompt: found an empty one in the list, expected at least one token in each"),
        ({"prompt": [10]}, "prompt: found the token 10, expected 0 to 9"),
        ({"prompt": [[1, 2], [3, -1]]}, "prompt: found the token -1, expected 0 to 9"),
        ({"prompt": ["1"] * 33, "n": 128}, "prompt: found 4224 answers to give, expected at most 4096"),
    ):
        assert client.post(PATHS[0], json=_of(PATHS[0]) | change).json()["error"]["message"] == message
    for change, message in (
        ({"input_ids": [10]}, "input_ids: is not served. Leave it out"),
        (
            {"chat_template_kwargs": {"chat_template": "{% for _ in range(10**9) %}{% endfor %}"}},
            "chat_template_kwargs: found 'chat_template', expected only enable_thinking, true or false",
        ),
    ):
        assert client.post(PATHS[1], json=_of(PATHS[1]) | change).json()["error"]["message"] == message


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(client: TestClient) -> None:
    widest = max(len(token) for token in AutoTokenizer.from_pretrained(EXAMPLES / "models/tiny_qwen3_moe").get_vocab())
    fits, long = "1" * 64 * widest, "1" * (64 * widest + 1)
    message = "found at least 65 tokens, expected at most 64"
    for path, parameter, change in (
        (PATHS[0], "prompt", {"prompt": long}),
        (PATHS[0], "prompt", {"prompt": [fits, long]}),
        (PATHS[1], "messages", {"messages": [{"role": "user", "content": fits}, {"role": "user", "content": "1"}]}),
        (PATHS[1], "messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": long}]}]}),
    ):
        answer = client.post(path, json=_of(path) | change)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)
        assert message in answer.json()["error"]["message"]
    assert client.post(PATHS[0], json=_of(PATHS[0]) | {"prompt": [fits, fits]}).status_code == 200


def test_a_body_of_any_size_is_not_read_to_its_end(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "MOST_BYTES", 1 << 20)
    answer = client.post(PATHS[0], content=b" " * (1 << 21))
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == "body: found more than 1 MiB, expected less"


@pytest.mark.parametrize("path", PATHS)
def test_what_is_right_comes_through_whole(client: TestClient, path: str) -> None:
    neutral = {
        "response_format": {"type": "text"},
        "logit_bias": None,
        "top_k": -1,
        "stop": [],
        "user": "somebody",
        "cache_salt": "a",
    }
    answer = client.post(path, json=_of(path) | neutral | {"seed": 2**63 - 1, "n": 3})
    stops = {PATHS[0]: None, PATHS[1]: [7, 8]}
    assert answer.json() == {"model": "it", "seed": 2**63 - 1, "n": 3, "stops": stops[path]}
    for prompt in ("99", ["99", "é"], [9, 0], [[9], [0]]):
        assert client.post(PATHS[0], json=_of(PATHS[0]) | {"prompt": prompt}).status_code == 200
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    assert client.post(PATHS[1], json=_of(PATHS[1]) | thinking).status_code == 200


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

    assert models() == ["it"] and client.get("/v1/models/it").json()["max_model_len"] == 64
    asked = _of(PATHS[0]) | {"model": "it-base"}
    refused = client.post(PATHS[0], json=asked)
    assert refused.json() == client.get("/v1/models/it-base").json() and refused.status_code == 404
    monkeypatch.setattr(state.state(), "base_name", "it-base")
    assert models() == ["it", "it-base"] and client.get("/v1/models/it-base").json()["id"] == "it-base"
    assert client.post(PATHS[0], json=asked).json()["model"] == "it-base"
    message = client.post(PATHS[0], json=asked | {"model": "base"}).json()["error"]["message"]
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
    for prefix in ("3", " 3"):
        expected = tokenizer("<s>[INST]" + prefix, add_special_tokens=False).input_ids
        assert public.go_on(SimpleNamespace(tokenizer_manager=manager), begun, prefix) == expected


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
    assert [problem for hook in public.HOOKS if (problem := _problem(hook))] == []
