"""Parses requests and writes answers in OpenAI's protocol of chat and text completions.

The requests come from programs in training. A request is refused if its answer would differ from OpenAI's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fp8rl.numerics.core.errors import UserError, shown
from fp8rl.numerics.core.reading import parse_json
from fp8rl.rollout.tasks.chat import ROLES, content_text, read_arguments, thoughts
from fp8rl.rollout.types import SamplingParams

MODEL = "policy"
"""The name of the model for programs. It is the same for every model."""
SETTINGS = {
    "model", "n", "max_tokens", "stop", "stream", "stream_options", "logprobs", "temperature", "top_p", "top_k",
    "min_p", "seed", "frequency_penalty", "presence_penalty", "user", "metadata", "store", "service_tier",
}  # fmt: skip
CHAT_SETTINGS = {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "max_completion_tokens",
    "top_logprobs", "chat_template_kwargs",
}  # fmt: skip
"""Additional settings of a chat."""
_IGNORED = {"prompt_cache_key", "safety_identifier"}
_CONSTANTS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "stream": (True, False),
}
"""The allowed values of settings that have only a few."""


class Refusal(Exception):
    """A request is not answered. The message has the reason."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclass(frozen=True)
class CompletionRequest:
    """A request for one turn of the model."""

    max_tokens: int | None
    """Largest number of tokens of the turn. None: as many as there is room for."""
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    """Whether a stream ends with the numbers of its tokens."""
    messages: tuple[dict[str, Any], ...] = ()
    """The messages of a chat, in the form that chat templates read."""
    tools: tuple[dict[str, Any], ...] = ()
    """The tools of a chat, in the form that chat templates read."""
    chat_template_kwargs: tuple[tuple[str, Any], ...] = ()
    may_call: bool = False
    """Whether the model may call tools."""
    prompt: str | tuple[int, ...] = ""
    """The prompt of a text completion, as text or tokens."""
    size: int = 0
    """Bytes of the request's body."""


@dataclass(frozen=True)
class Answer:
    """The model's turn in answer to a request."""

    text: str
    """The turn's text, without its tool calls and without the token that ended it."""
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    """stop, length or tool_calls."""
    prompt_tokens: int
    """Number of tokens before the turn."""
    completion_tokens: int
    """Number of tokens of the turn."""
    number: int

    def completion(self, chat: bool) -> dict[str, Any]:
        """Return the answer as JSON for a request without streaming."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish_reason, "logprobs": None}
        if chat:
            content = self.text if self.text or not self.tool_calls else None
            calls = {"tool_calls": list(self.tool_calls)} if self.tool_calls else {}
            choice["message"] = {"role": "assistant", "content": content, **calls}
        else:
            choice["text"] = self.text
        head = self._head("chat.completion" if chat else "text_completion", chat)
        return {**head, "choices": [choice], "usage": self._usage}

    def events(self, chat: bool, include_usage: bool) -> Iterator[str]:
        """Yield the answer as the events of a stream, each as JSON."""
        head = self._head("chat.completion.chunk" if chat else "text_completion", chat)
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": self.text}]
        if self.tool_calls:
            deltas.append({"tool_calls": [{"index": i, **call} for i, call in enumerate(self.tool_calls)]})
        for delta in (*deltas, {}):
            choice: dict[str, Any] = {"index": 0, "finish_reason": None if delta else self.finish_reason}
            choice |= {"delta": delta} if chat else {"text": delta.get("content", "")}
            yield json.dumps({**head, "choices": [choice]})
        if include_usage:
            yield json.dumps({**head, "choices": [], "usage": self._usage})
        yield "[DONE]"

    def _head(self, kind: str, chat: bool) -> dict[str, Any]:
        return {"id": f"{'chatcmpl' if chat else 'cmpl'}-{self.number}", "object": kind, "created": 0, "model": MODEL}

    @property
    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Function(_Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(_Strict):
    type: Literal["function"] = "function"
    function: _Function


class _ChatTemplateKwargs(_Strict):
    model_config = ConfigDict(extra="forbid")

    enable_thinking: bool = False


_Text = Annotated[str, Field(min_length=1)]
_Count = Annotated[int | None, Field(ge=1)]


class _Settings(_Strict):
    """Checks the form of some settings."""

    max_completion_tokens: _Count = None
    max_tokens: _Count = None
    stop: Annotated[list[_Text], Field(max_length=128)] = []
    tools: list[_Tool] = []
    chat_template_kwargs: _ChatTemplateKwargs = _ChatTemplateKwargs()


def read_request(
    body: bytes, chat: bool, sampling: SamplingParams, override: Collection[str], vocabulary: int
) -> CompletionRequest:
    """Parse the body of a request. Raises Refusal.

    sampling: the run's parameters. override: settings that are always the run's; a request's values are ignored.
    """
    try:
        found = parse_json(body)
    except ValueError as error:
        raise Refusal(f"body: found {error}, expected a JSON object") from error
    if not isinstance(found, dict):
        raise Refusal(f"body: found {type(found).__name__}, expected a JSON object")
    found = {name: value for name, value in found.items() if value is not None}
    if found.get("model") != MODEL:
        message = f"The model {shown(found.get('model'), 80)} does not exist; a run serves {MODEL!r} (OPENAI_MODEL)."
        raise Refusal(message, "model", 404, "model_not_found")
    for name in found.keys() - SETTINGS - _IGNORED - (CHAT_SETTINGS if chat else {"prompt"}):
        raise Refusal(f"{name[:80]}: is not supported for a program in training. Leave it out", name[:80])
    _check_constants(found, sampling, override)
    try:
        stop = found.get("stop", [])
        settings = _Settings.model_validate(found | {"stop": [stop] if isinstance(stop, str) else stop})
    except ValidationError as error:
        first = error.errors()[0]
        place, value = ".".join(map(str, first["loc"])), shown(first["input"], 80)
        raise Refusal(f"{place}: found {value}. {first['msg']}", str(first["loc"][0])) from error
    options = found.get("stream_options")
    request: dict[str, Any] = {
        "size": len(body),
        "max_tokens": settings.max_completion_tokens or settings.max_tokens,
        "stop": tuple(settings.stop),
        "stream": bool(found.get("stream")),
        "include_usage": bool(isinstance(options, dict) and options.get("include_usage")),
    }
    if not chat:
        prompt = found.get("prompt")
        tokens = isinstance(prompt, list) and all(type(token) is int and 0 <= token < vocabulary for token in prompt)
        if not prompt or not (tokens or isinstance(prompt, str)):
            expected = f"a text or a list of tokens from 0 to {vocabulary - 1}"
            raise Refusal(f"prompt: found {shown(prompt, 80)}, expected {expected}", "prompt")
        return CompletionRequest(**request, prompt=tuple(prompt) if tokens else prompt)
    messages = found.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal(f"messages: found {shown(messages, 80)}, expected a list of messages", "messages")
    return CompletionRequest(
        **request,
        messages=tuple(read_message(message, f"messages.{number}") for number, message in enumerate(messages)),
        tools=tuple(found.get("tools", ())),
        chat_template_kwargs=tuple(found.get("chat_template_kwargs", {}).items()),
        may_call=found.get("tool_choice") != "none" and bool(found.get("tools")),
    )


def _check_constants(found: Mapping[str, Any], sampling: SamplingParams, override: Collection[str]) -> None:
    """Refuse settings that differ from the run's, because training assumes the run's distribution for every token."""
    allowed: dict[str, tuple[Any, ...]] = {"seed": (), "tool_choice": ("auto", "none")}  # others need a grammar
    if sampling.temperature:  # else it is greedy whatever they say
        allowed |= {name: (getattr(sampling, name),) for name in ("temperature", "top_p", "top_k", "min_p")}
        allowed |= {"frequency_penalty": (0,), "presence_penalty": (0,)}
    for name, values in (_CONSTANTS | allowed).items():
        if name in found and found[name] not in values and name not in override:
            remedy = "Leave it out"
            if name in allowed:
                remedy += f", or add {name} to environment.harness.override, which ignores the program's value"
            expected = f"{' or '.join(map(repr, values)) or 'none'}, as in the run"
            raise Refusal(f"{name}: found {shown(found[name], 80)}, expected {expected}. {remedy}", name)


def read_message(found: Any, place: str) -> dict[str, Any]:
    """Return a message in the form that `rollout.tasks.chat` reads. Raises Refusal.

    Content and thoughts become text. The arguments of a call become an object.
    """
    role = found.get("role") if isinstance(found, dict) else found
    if not isinstance(found, dict) or role not in ROLES:
        raise Refusal(f"{place}: found the role {shown(role, 80)}, expected {', '.join(ROLES)}", place)
    message = {name: found[name] for name in ("name", "tool_call_id") if isinstance(found.get(name), str)}
    try:
        message |= {"role": role, "content": content_text(found.get("content"))}
        message |= {"reasoning_content": said} if (said := thoughts(found)) else {}
    except UserError as error:
        raise Refusal(f"{place}: {error}", place) from error
    if found.get("tool_calls"):
        message["tool_calls"] = _tool_calls(found["tool_calls"], place)
    return message


def _tool_calls(found: Any, place: str) -> list[dict[str, Any]]:
    try:
        functions = [call["function"] for call in found]
        named = [{"name": str(each["name"]), "arguments": read_arguments(each.get("arguments"))} for each in functions]
        return [{"id": str(call.get("id", "")), "type": "function", "function": one} for call, one in zip(found, named)]
    except (TypeError, KeyError, AttributeError) as error:
        raise Refusal(f"{place}.tool_calls: found {shown(found, 80)}, expected a list of calls", place) from error
