"""The changes of `fp8rl serve` at SGLang's OpenAI endpoints, for clients that are not ours.

Every error has OpenAI's form, and says nothing of where the code lies. A request that would be answered wrongly is
refused: an unknown model, settings that are not served, and numbers that would end the engine.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Iterator
from itertools import accumulate
from typing import Any

from fp8rl.numerics.core.reading import parse_json
from fp8rl.numerics.sampling import answer_seed
from fp8rl.rollout.engine.plugin.hooks import Hook
from fp8rl.rollout.engine.plugin.state import state
from fp8rl.rollout.tasks.chat import end_ids, render
from fp8rl.rollout.tasks.openai import CHAT_SETTINGS, SETTINGS, Refusal, error_body, read_message
from fp8rl.rollout.tasks.tokens import behind_ids, fewest_tokens, text_ids, text_size
from fp8rl.rollout.tasks.tool_calls import give_calls, hold_calls, read_calls

ENDPOINTS = {"/health", "/v1/completions", "/v1/chat/completions"}
"""The endpoints that are opened besides those of the engine's owner, and besides the list of models (`open_models`)."""
MOST_ANSWERS, MOST_OF_A_REQUEST, MOST_LOGPROBS, LARGEST_SEED, LARGEST_TOP_K = 128, 4096, 20, 2**63 - 1, 2**31 - 1
MOST_BYTES, LONGEST_SALT = 32 << 20, 256
MOST_READ = 8 * MOST_BYTES
"""Bytes of a request that are waited for, so that its client reads why it is refused."""
LARGEST = {"response_format": 32 << 10, "stop": 32 << 10, "tools": 512 << 10}
"""Characters in JSON: grammars are made of them, or tokens, in time that grows faster than they do."""
_COMMON = SETTINGS | {
    "min_tokens", "repetition_penalty", "stop_token_ids", "ignore_eos", "no_stop_trim", "skip_special_tokens",
    "spaces_between_special_tokens", "return_token_ids", "cache_salt",
}  # fmt: skip
SERVED = {
    "/v1/completions": _COMMON | {"prompt", "echo"},
    "/v1/chat/completions": _COMMON | CHAT_SETTINGS | {"continue_final_message"},
}
"""The settings that a request may have. SGLang takes a hundred more: some would be ignored in silence, some let a
client run code or take another's answer, and some end the engine."""


async def answer(original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any) -> Any:
    """Answer or refuse a request (`OpenAIServingBase.handle_request`)."""
    names = _names(serving.tokenizer_manager)
    if "model" in request.model_fields_set and request.model not in names:
        return _no_such_model(request.model, names)
    for parameter, message in _problems(request, names, serving.tokenizer_manager):
        return error_response(serving, f"{parameter}: {message}", param=parameter)
    if request.top_k == 1 and (request.temperature is None or request.temperature >= 1e-6):
        request.top_k, request.top_p = -1, 1e-9  # keeps as few; SGLang takes a top-k of 1 for a temperature of 0
    if hasattr(request, "messages"):
        if request.tools and serving.tool_call_parser is None:
            message = "found some, expected a server that knows the format in which the model calls them: --tool-parser"
            return error_response(serving, f"tools: {message}", param="tools")
        if not request.ignore_eos:
            request.stop_token_ids = [*(request.stop_token_ids or ()), *serving.tokenizer_manager.tokenizer.ends]
    return await original(serving, request, raw_request)


def render_as_trained(tokenizer: Any, *_: Any, **__: Any) -> Any:
    """Write chats as the run's prompts are written, note where their turns end, and keep the text of tokens as it is
    (after `get_tokenizer`)."""
    tokenizer.clean_up_tokenization_spaces = False
    plain = copy.copy(tokenizer)

    def apply(messages: Any, tools: Any = None, add_generation_prompt: bool = False, **options: Any) -> str:
        sent = options.pop(_SENT)
        for name in ("tokenize", "return_dict"):
            options.pop(name, None)
        if tools:  # without those that a forced call leaves out
            names = [tool.get("function", tool)["name"] for tool in tools]
            options["tools"] = [tool for tool in sent["tools"] if tool["function"]["name"] in names]
        return render(plain, sent["messages"][: len(messages)], options, answer=add_generation_prompt)

    tokenizer.apply_chat_template = apply
    tokenizer.ends = end_ids(plain) if tokenizer.chat_template else ()
    return tokenizer


def open_models(app: Any, manager: Callable[[], Any]) -> None:
    """Put the list of models, and each by itself, in place of SGLang's, which has the one name alone.

    manager: SGLang's TokenizerManager, once there is one.
    """

    @app.get("/v1/models")  # type: ignore[untyped-decorator]
    async def models() -> Any:
        return {"object": "list", "data": [_card(name, manager()) for name in _names(manager())]}

    @app.get("/v1/models/{name:path}")  # type: ignore[untyped-decorator]
    async def model(name: str) -> Any:
        names = _names(manager())
        return _card(name, manager()) if name in names else _no_such_model(name, names)


def _names(manager: Any) -> list[str]:
    """Return the models that clients may name: the model, and the base without its adapters, if it has some."""
    return [manager.served_model_name, *filter(None, [state().base_name])]


def _card(name: str, manager: Any) -> Any:
    from sglang.srt.entrypoints.openai.protocol import ModelCard

    return ModelCard(id=name, root=name, max_model_len=manager.model_config.context_len)


def _no_such_model(name: str, names: list[str]) -> Any:
    message = f"The model {name!r} does not exist; this server has {_said(names)}."
    return error_response(None, message, status_code=404, param="model", code="model_not_found")


def _said(names: list[str]) -> str:
    return " and ".join(map(repr, names))


def name_base(serving: Any, request_model: str, explicit_lora_path: Any) -> str | None:
    """Return the name of the base, for requests without the adapters (`OpenAIServingBase._resolve_lora_path`)."""
    return request_model if request_model == state().base_name else None


async def mark_base(manager: Any, obj: Any) -> None:
    """Set the base's name as the `lora_id` of each answer (`TokenizerManager._validate_and_resolve_lora`).

    By it the engine leaves the adapters out (`AdaptedRows`) and keeps prefixes apart.
    """
    obj.lora_id = obj.lora_path
    for part in obj.__dict__.get("_sub_obj_cache", {}).values():
        part.lora_id = part.lora_path


def error_response(
    serving: Any,
    message: str,
    err_type: str = "BadRequestError",
    status_code: int = 400,
    param: str | None = None,
    code: str | None = None,
) -> Any:
    """Return an error in OpenAI's form (`OpenAIServingBase.create_error_response`)."""
    from fastapi.responses import JSONResponse

    return JSONResponse(error_body(message, status_code, param, code), status_code)


class ObjectsOnly:
    """A middleware before `app` that lets only JSON objects through, as SGLang's validators take other bodies apart."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in SERVED:
            return await self._app(scope, receive, send)
        body, size, message = bytearray(), 0, {"more_body": True}
        while message.get("more_body") and size <= MOST_READ:
            message = await receive()
            size += len(message.get("body", b""))
            body += message.get("body", b"") if size <= MOST_BYTES else b""
        if size > MOST_BYTES:
            said = f"body: found more than {MOST_BYTES >> 20} MiB, expected less"
            return await error_response(None, said, status_code=413)(scope, receive, send)
        try:
            found = parse_json(bytes(body))
            if not isinstance(found, dict):
                raise ValueError("another value")
        except ValueError as error:
            return await error_response(None, f"body: found {error}, expected a JSON object")(scope, receive, send)
        for parameter, why in _not_served(found, SERVED[scope["path"]]):
            return await error_response(None, f"{parameter}: {why}", param=parameter)(scope, receive, send)
        try:
            read = [{"type": "http.request", "body": json.dumps(_as_read(found)).encode(), "more_body": False}]
        except Refusal as refusal:
            return await error_response(None, str(refusal), param=refusal.param)(scope, receive, send)

        async def again() -> Any:
            return read.pop() if read else await receive()

        await self._app(scope, again, send)


class InOneForm:
    """A middleware around all of `app` that gives OpenAI's form to errors without it: a wrong key, an unknown path."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        began: dict[str, Any] | None = None
        body = b""

        async def watched(message: Any) -> None:
            nonlocal began, body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                began = message
            elif began is None:
                await send(message)
            elif message["type"] == "http.response.body":
                body += message.get("body", b"")
                if not message.get("more_body"):
                    await self._finish(scope, receive, send, began, body)

        await self._app(scope, receive, watched)

    @staticmethod
    async def _finish(scope: Any, receive: Any, send: Any, began: dict[str, Any], body: bytes) -> None:
        try:
            formed = isinstance(json.loads(body)["error"], dict)
        except (ValueError, TypeError, KeyError):
            formed = False
        if formed:
            await send(began)
            return await send({"type": "http.response.body", "body": body})
        status = began["status"]
        message, code = _REFUSALS.get(status, ("The request cannot be answered.", None))
        message = message.format(method=scope.get("method"), path=scope.get("path", "")[:80])
        await error_response(None, message, status_code=status, code=code)(scope, receive, send)


_REFUSALS = {
    401: ("found no key that this server knows, expected it as 'Authorization: Bearer ...'", "invalid_api_key"),
    403: ("found a key that does not open this path", "invalid_api_key"),
    404: ("found no path {path} here, expected /v1/models, /v1/completions or /v1/chat/completions", "unknown_url"),
    405: ("found {method} {path}, expected another method", "method_not_allowed"),
}
"""The message and the code of an error that has neither, by its status."""


def one_form(result: None, app: Any, **_: Any) -> None:
    """Put `InOneForm` first (after `add_api_key_middleware`, which is added last and so would come before it)."""
    app.add_middleware(InOneForm)


async def invalid(request: Any, error: Any) -> Any:
    """Answer an object that is not of the request's form. SGLang's answer quotes the lines of its code."""
    first, *_ = error.errors()
    place = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    return error_response(None, f"{place}: {first['msg']}", param=place)


def seed_each_answer(manager: Any, tokenized: Any) -> None:
    """Give each of several answers to a prompt a seed of its own (before `TokenizerManager._send_one_request`).

    Those of one prompt follow each other, and share one object of sampling parameters.
    """
    shared = getattr(tokenized, "sampling_params", None)
    if shared is None or shared.n == 1 or shared.sampling_seed is None:
        return
    last, number = getattr(manager, "_last_shared", (None, -1))
    number = number + 1 if last is shared else 0
    manager._last_shared = shared, number
    tokenized.sampling_params = copy.copy(shared)
    tokenized.sampling_params.sampling_seed = answer_seed(shared.sampling_seed, 0, 0, number)


def with_offsets(logprobs: Any, *_: Any, **__: Any) -> Any:
    """Count the characters of the tokens before each, where SGLang says -1 (after `to_openai_style_logprobs`)."""
    logprobs.text_offset = [0, *accumulate(len(token) for token in logprobs.tokens)][:-1]
    return logprobs


async def begin_once(manager: Any, texts: str | list[str], is_cross_encoder: bool = False) -> tuple[Any, None]:
    """Tokenize prompts with one BOS each (`TokenizerManager._tokenize_texts`)."""
    if not texts:
        raise ValueError("prompt: found an empty text, expected at least one character")
    ids = [text_ids(manager.tokenizer, text) for text in ([texts] if isinstance(texts, str) else texts)]
    return ids[0] if isinstance(texts, str) else ids, None


def go_on(serving: Any, prompt_ids: list[int], assistant_prefix: str) -> list[int]:
    """Put the beginning of an answer behind its prompt (`_append_assistant_prefix_to_prompt_ids`)."""
    return prompt_ids + behind_ids(serving.tokenizer_manager.tokenizer, assistant_prefix, prompt_ids)


def watch_whole_stops(result: None, sampling: Any, *_: Any) -> None:
    """Look for a stop in as many tokens as it has bytes, however the model writes it (after `normalize`)."""
    sampling.stop_str_max_len = max((len(stop.encode()) for stop in sampling.stop_strs), default=0)


def _not_served(found: dict[str, Any], settings: set[str]) -> Iterator[tuple[str, str]]:
    """Yield each setting of a body that is not served, and its remedy."""
    for parameter in sorted(found.keys() - settings):
        if found[parameter] is not None and (parameter, found[parameter]) != ("response_format", {"type": "text"}):
            yield parameter[:80], "is not served. Leave it out"
    for parameter, most in LARGEST.items():
        if (size := len(json.dumps(found.get(parameter)))) > most:
            yield parameter, f"found {size} characters, expected at most {most}"
    if found.get("echo") and found.get("logprobs") == 0:
        yield (
            "logprobs",
            "found 0 with echo, expected 1 to 20, as SGLang gives those of a prompt with the most probable",
        )
    form = found.get("response_format")
    if form is not None and not (isinstance(form, dict) and form.get("type") in _FORMS):
        yield "response_format", f"found {str(form)[:80]}, expected an object whose type is {', '.join(_FORMS)}"
    of_template = found.get("chat_template_kwargs")
    for name, value in of_template.items() if isinstance(of_template, dict) else ():
        if name != "enable_thinking" or not isinstance(value, bool):
            yield "chat_template_kwargs", f"found {name[:80]!r}, expected only enable_thinking, true or false"


def _as_read(found: dict[str, Any]) -> dict[str, Any]:
    """Return a body with the messages as they are read in training, once more for the chat template.

    SGLang leaves out some of their keys, takes a last turn of the model for the user's, and adds keys to tools.

    Raises Refusal.
    """
    messages, options = found.get("messages"), found.get("chat_template_kwargs") or {}
    if not isinstance(messages, list) or not isinstance(options, dict):
        return found
    read = [read_message(each, f"messages.{number}") for number, each in enumerate(messages)]
    if found.get("continue_final_message") and read and len(read[-1]) > 2:
        raise Refusal("continue_final_message: found more than a content in the last message, expected that alone")
    sent = {_SENT: {"messages": read, "tools": found.get("tools")}}
    return found | {"messages": read, "chat_template_kwargs": options | sent}


def _problems(request: Any, names: list[str], manager: Any) -> Iterator[tuple[str, str]]:
    """Yield each bad parameter, and its fault. manager: SGLang's TokenizerManager."""
    vocabulary = manager.model_config.vocab_size
    if "model" not in request.model_fields_set:
        yield "model", f"found none, expected {_said(names)}"
    bounds = {"n": (1, MOST_ANSWERS), "seed": (0, LARGEST_SEED)}
    bounds |= dict.fromkeys(("logprobs", "top_logprobs"), (0, MOST_LOGPROBS))
    for parameter, (least, most) in bounds.items():
        found = getattr(request, parameter, None)
        if found is not None and not least <= found <= most:
            yield parameter, f"found {found}, expected {least} to {most}"
    if request.top_k is not None and not (request.top_k == -1 or 1 <= request.top_k <= LARGEST_TOP_K):
        yield "top_k", f"found {request.top_k}, expected 1 to {LARGEST_TOP_K}, or -1 for all"
    if "" in ([request.stop] if isinstance(request.stop, str) else request.stop or ()):
        yield "stop", "found an empty text, expected at least one character in each"
    for token in request.stop_token_ids or ():
        if not _is_in(token, vocabulary):
            yield "stop_token_ids", f"found {token}, expected 0 to {vocabulary - 1}"
    if not isinstance(request.cache_salt, str | None) or len(request.cache_salt or "") > LONGEST_SALT:
        yield "cache_salt", f"found another value, expected a text of at most {LONGEST_SALT} characters"
    prompt = getattr(request, "prompt", "")
    if isinstance(prompt, list) and ([] in prompt or "" in prompt):
        yield "prompt", "found an empty one in the list, expected at least one token in each"
    for part in prompt if isinstance(prompt, list) else ():
        outside = [token for token in ([part] if isinstance(part, int) else part) if not _is_in(token, vocabulary)]
        if outside:
            yield "prompt", f"found the token {outside[0]}, expected 0 to {vocabulary - 1}"
    # Each prompt by itself, or all messages of a chat, become tokens.
    texts: list[tuple[str, Any]] = [
        ("prompt", text) for text in (prompt if isinstance(prompt, list) else [prompt]) if isinstance(text, str)
    ]
    messages = request.model_dump(include={"messages"}).get("messages")
    if messages is not None:
        texts.insert(0, ("messages", [message.get("content") for message in messages]))
    for parameter, text in texts:
        tokens, limit = fewest_tokens(manager.tokenizer, text_size(text)), manager.model_config.context_len
        if tokens > limit:  # which would be tokenized first, for minutes
            yield parameter, f"found at least {tokens} tokens, expected at most {limit}"
    several = isinstance(prompt, list) and not all(isinstance(part, int) for part in prompt)
    if several and len(prompt) * request.n > MOST_OF_A_REQUEST:
        yield "prompt", f"found {len(prompt) * request.n} answers to give, expected at most {MOST_OF_A_REQUEST}"


def _is_in(token: int | str, vocabulary: int) -> bool:
    """Return True if a token id is one of the model's; characters of a text are. Another one would end the engine."""
    return isinstance(token, str) or 0 <= token < vocabulary


_SENT = "as_sent"
"""The argument of the chat template that has a request's messages and tools."""
_FORMS = ("text", "json_object", "json_schema")
_PARSER = "function_call.function_call_parser.FunctionCallParser."
_SERVING = "entrypoints.openai.serving_base.OpenAIServingBase."
_TOKENIZER = "managers.tokenizer_manager.TokenizerManager."
HOOKS = (
    Hook(_SERVING + "handle_request", "around", answer, "request raw_request"),
    Hook(_SERVING + "create_error_response", "replace", error_response, "message err_type status_code param"),
    Hook(_SERVING + "_resolve_lora_path", "replace", name_base, "request_model explicit_lora_path"),
    Hook(_TOKENIZER + "_validate_and_resolve_lora", "replace", mark_base, "obj"),
    Hook(
        "entrypoints.openai.serving_completions.to_openai_style_logprobs",
        "after",
        with_offsets,
        "input_token_logprobs output_token_logprobs input_top_logprobs output_top_logprobs",
    ),
    Hook(
        "managers.tokenizer_manager.get_tokenizer",
        "after",
        render_as_trained,
        "tokenizer_name args tokenizer_mode trust_remote_code tokenizer_revision tokenizer_backend kwargs",
    ),
    Hook(_PARSER + "parse_non_stream", "around", read_calls, "full_text"),
    Hook(_PARSER + "parse_stream_chunk", "around", hold_calls, "chunk_text"),
    Hook(_PARSER + "parse_stream_end", "around", give_calls, ""),
    Hook("utils.auth.add_api_key_middleware", "after", one_form, "app api_key admin_api_key"),
    Hook(_TOKENIZER + "_send_one_request", "before", seed_each_answer, "tokenized_obj"),
    Hook(_TOKENIZER + "_tokenize_texts", "replace", begin_once, "texts is_cross_encoder"),
    Hook("sampling.sampling_params.SamplingParams.normalize", "after", watch_whole_stops, "tokenizer"),
    Hook(
        "entrypoints.openai.serving_chat.OpenAIServingChat._append_assistant_prefix_to_prompt_ids",
        "replace",
        go_on,
        "prompt_ids assistant_prefix",
    ),
)

# A time limit for the headers of a request, which uvicorn 0.54 has not: who opens a connection and sends nothing, or a
# byte now and then, would hold it for ever.

HEADERS_S = 30.0
"""Seconds that a connection may be open without a request, and between an answer and the next request."""


def limit_headers(seconds: float = HEADERS_S) -> None:
    """Close connections without a whole request, in the HTTP servers of this process that start from now on."""
    from uvicorn.protocols.http import auto

    auto.AutoHTTPProtocol = limited(auto.AutoHTTPProtocol, seconds)


def limited(protocol: type[Any], seconds: float) -> type[Any]:
    """Return uvicorn's HTTP protocol with the limit. Its `cycle` is the last request whose headers were whole."""

    class Limited(protocol):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._look_later()

        def _look_later(self) -> None:
            asyncio.get_running_loop().call_later(seconds, self._look, self.cycle)

        def _look(self, before: Any) -> None:
            """Close the connection if it has had no request since the last look."""
            if self.transport.is_closing():
                return
            if self.cycle is before and (before is None or before.response_complete):
                self.transport.close()
            else:
                self._look_later()

    return Limited
