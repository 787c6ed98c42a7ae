"""Changes SGLang's OpenAI endpoints for `fp8rl serve`: prompts as in training, seeded answers, and a name for the base.

A request is refused if SGLang would give a wrong answer without a message, or if it would end the engine. All other
errors are SGLang's own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from itertools import accumulate
from typing import Any

import jinja2

from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.sampling import answer_seed
from fp8rl.rollout.engine.plugin.hooks import Hook
from fp8rl.rollout.engine.plugin.state import state
from fp8rl.rollout.tasks.chat import end_ids, prompt_ids
from fp8rl.rollout.tasks.openai import CHAT_SETTINGS, SETTINGS, Refusal, read_message
from fp8rl.rollout.tasks.tokens import behind_ids, text_ids
from fp8rl.rollout.tasks.tool_calls import give_calls, hold_calls, read_calls

ENDPOINTS = {"/health", "/v1/completions", "/v1/chat/completions"}
"""SGLang's endpoints for clients. The endpoints for the engine's owner are open too. `list_models` adds one of ours."""
_COMMON = SETTINGS | {
    "min_tokens", "repetition_penalty", "stop_token_ids", "ignore_eos", "no_stop_trim", "skip_special_tokens",
    "spaces_between_special_tokens", "return_token_ids", "cache_salt",
}  # fmt: skip
SERVED = {"prompt": _COMMON | {"prompt", "echo"}, "messages": _COMMON | CHAT_SETTINGS | {"continue_final_message"}}
"""The settings that a completion (with a `prompt`) and a chat (with `messages`) may have. SGLang accepts a hundred
more. It ignores some of them, and all that are misspelt. Some of them take the answer of another request, and some end
the engine."""
BOUNDS = {"n": (1, 128), "seed": (0, 2**63 - 1), "logprobs": (0, 20), "top_logprobs": (0, 20), "top_k": (-1, 2**31 - 1)}
"""The smallest and the largest value of a setting. SGLang takes an `n` of -3 as 1. Other values end the engine."""
_sent: ContextVar[dict[str, Any]] = ContextVar("sent")
"""The body of the current chat request, with its messages in the form that training reads."""
_ends = lru_cache(maxsize=1)(end_ids)


async def answer(original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any) -> Any:
    """Answer or refuse a request (`OpenAIServingBase.handle_request`)."""
    tokenizer, names = serving.tokenizer_manager.tokenizer, _names(serving.tokenizer_manager)
    if request.model not in names:
        message = f"The model {request.model!r} does not exist; this server has {' and '.join(map(repr, names))}."
        return serving.create_error_response(message, "model_not_found", status_code=404, param="model")
    sent = await raw_request.json()
    try:
        if chat := hasattr(request, "messages"):
            messages = [read_message(each, f"messages.{number}") for number, each in enumerate(sent["messages"])]
            _sent.set(sent := sent | {"messages": messages})
        for parameter, message in _problems(serving, request, sent):
            raise Refusal(f"{parameter}: {message}", parameter)
    except Refusal as refusal:
        return serving.create_error_response(str(refusal), param=refusal.param)
    if request.top_k == 1 and (request.temperature is None or request.temperature >= 1e-6):
        request.top_k, request.top_p = -1, 1e-9  # keeps as few; SGLang takes a top-k of 1 for a temperature of 0
    if chat and not request.ignore_eos:
        request.stop_token_ids = [*(request.stop_token_ids or ()), *_ends(tokenizer)]
    return await original(serving, request, raw_request)


def _problems(serving: Any, request: Any, sent: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (parameter, its fault) for each bad parameter. sent: the request's body."""
    chat = sent["messages"] if hasattr(request, "messages") else None
    for parameter in sorted(sent.keys() - SERVED["prompt" if chat is None else "messages"]):
        if sent[parameter] is not None and (parameter, sent[parameter]) != ("response_format", {"type": "text"}):
            yield parameter[:80], "is not served. Leave it out"
    for parameter, (least, most) in BOUNDS.items():
        found = getattr(request, parameter, None)
        if found is not None and not least <= found <= most:
            yield parameter, f"found {found}, expected {least} to {most}"
    if "" in ([request.stop] if isinstance(request.stop, str) else request.stop or ()):  # SGLang stops at once
        yield "stop", "found an empty text, expected at least one character"
    if sent.get("echo") and sent.get("logprobs") == 0:  # SGLang fails
        yield "logprobs", "found 0 with echo, expected 1 to 20"
    if chat and request.tools and serving.tool_call_parser is None:
        yield "tools", "found tools, but no parser for tool calls, expected a server with --tool-parser"
    if chat and request.continue_final_message and len(chat[-1]) > 2:
        yield "continue_final_message", "found more than role and content in the last message, expected only these two"
    taken = inspect.signature(serving.tokenizer_manager.tokenizer.apply_chat_template).parameters
    for name in sorted(taken.keys() & (getattr(request, "chat_template_kwargs", None) or {})):
        # A template of the client's could compute for ever, and no other request would be answered.
        yield "chat_template_kwargs", f"found {name}, expected only what the model's own template reads"
    prompt: Any = sent.get("prompt") if isinstance(sent.get("prompt"), list) else []
    tokens = [("stop_token_ids", token) for token in request.stop_token_ids or ()]
    tokens += [("prompt", token) for part in prompt for token in (part if isinstance(part, list) else [part])]
    vocabulary = serving.tokenizer_manager.model_config.vocab_size
    for parameter, token in tokens:
        if isinstance(token, int) and not 0 <= token < vocabulary:
            yield parameter, f"found the token {token}, expected 0 to {vocabulary - 1}"


def write_chat(serving: Any, request: Any, tools: Any, is_multimodal: bool) -> Any:
    """Tokenize a chat as training tokenizes prompts. Replaces `OpenAIServingChat._apply_jinja_template`.

    SGLang leaves out some keys of messages, takes a last turn of the model for the user's, and adds keys to tools.
    tools: the tools to write. For a forced call these are not all tools of the request.

    Raises ValueError if the template cannot write the chat.
    """
    from sglang.srt.entrypoints.openai.protocol import MessageProcessingResult

    sent, tokenizer, begun = _sent.get(), serving.tokenizer_manager.tokenizer, ""
    messages, options = sent["messages"], dict(request.chat_template_kwargs or {})
    if tools:
        names = [tool["function"]["name"] for tool in tools]
        options["tools"] = [tool for tool in sent["tools"] if tool["function"]["name"] in names]
    if request.continue_final_message and messages[-1]["role"] == "assistant":
        messages, begun = messages[:-1], messages[-1]["content"]
    try:
        ids = prompt_ids(tokenizer, messages, options)
    except (UserError, jinja2.TemplateError, TypeError) as error:
        raise ValueError(str(error)) from error
    ids += behind_ids(tokenizer, begun, ids) if begun else []
    return MessageProcessingResult("", ids, None, None, None, [], request.stop)


def keep_text(tokenizer: Any, *_: Any, **__: Any) -> Any:
    """Turn off the tokenizer's clean-up of spaces, so that texts stay as they are (after `get_tokenizer`)."""
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def list_models(app: Any, manager: Callable[[], Any]) -> None:
    """Add an endpoint that lists all models. (SGLang's own lists one.) manager: returns SGLang's TokenizerManager."""
    from sglang.srt.entrypoints.openai.protocol import ModelCard, ModelList

    @app.get("/v1/models")  # type: ignore[untyped-decorator]
    async def models() -> Any:
        length = manager().model_config.context_len
        return ModelList(data=[ModelCard(id=name, root=name, max_model_len=length) for name in _names(manager())])


def _names(manager: Any) -> list[str]:
    """Return the names of models for clients: the model and, if it has adapters, its base without them."""
    return [manager.served_model_name, *filter(None, [state().base_name])]


def name_base(serving: Any, request_model: str, explicit_lora_path: Any) -> str | None:
    """Return the base's name if a request is for the base. Replaces `OpenAIServingBase._resolve_lora_path`."""
    return request_model if request_model == state().base_name else None


async def mark_base(manager: Any, obj: Any) -> None:
    """Set the base's name as `lora_id` of requests for it. Replaces `TokenizerManager._validate_and_resolve_lora`.

    For requests with this id the engine leaves out the adapters (`AdaptedRows`), and caches prefixes separately.
    """
    obj.lora_id = obj.lora_path
    for part in obj.__dict__.get("_sub_obj_cache", {}).values():
        part.lora_id = part.lora_path


def seed_each_answer(manager: Any, tokenized: Any) -> None:
    """Give each of several answers to a prompt its own seed (before `TokenizerManager._send_one_request`).

    The answers to one prompt come one after the other, and share one object of sampling parameters.
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
    """Set each token's offset in the text, for which SGLang writes -1 (after `to_openai_style_logprobs`)."""
    logprobs.text_offset = [0, *accumulate(len(token) for token in logprobs.tokens)][:-1]
    return logprobs


async def begin_once(manager: Any, texts: str | list[str], is_cross_encoder: bool = False) -> tuple[Any, None]:
    """Tokenize prompts, each with exactly one BOS. Replaces `TokenizerManager._tokenize_texts`."""
    if not texts:
        raise ValueError("prompt: found an empty text, expected at least one character")
    ids = [text_ids(manager.tokenizer, text) for text in ([texts] if isinstance(texts, str) else texts)]
    return ids[0] if isinstance(texts, str) else ids, None


def watch_whole_stops(result: None, sampling: Any, *_: Any) -> None:
    """Make SGLang search for a stop string in as many tokens as the string has bytes: a token may be one byte."""
    sampling.stop_str_max_len = max((len(stop.encode()) for stop in sampling.stop_strs), default=0)


_PARSER = "function_call.function_call_parser.FunctionCallParser."
_SERVING = "entrypoints.openai.serving_base.OpenAIServingBase."
_TOKENIZER = "managers.tokenizer_manager.TokenizerManager."
HOOKS = (
    Hook(_SERVING + "handle_request", "around", answer, "request raw_request"),
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
        keep_text,
        "tokenizer_name args tokenizer_mode trust_remote_code tokenizer_revision tokenizer_backend kwargs",
    ),
    Hook(_PARSER + "parse_non_stream", "around", read_calls, "full_text"),
    Hook(_PARSER + "parse_stream_chunk", "around", hold_calls, "chunk_text"),
    Hook(_PARSER + "parse_stream_end", "around", give_calls, ""),
    Hook(_TOKENIZER + "_send_one_request", "before", seed_each_answer, "tokenized_obj"),
    Hook(_TOKENIZER + "_tokenize_texts", "replace", begin_once, "texts is_cross_encoder"),
    Hook("sampling.sampling_params.SamplingParams.normalize", "after", watch_whole_stops, "tokenizer"),
    Hook(
        "entrypoints.openai.serving_chat.OpenAIServingChat._apply_jinja_template",
        "replace",
        write_chat,
        "request tools is_multimodal",
    ),
)
