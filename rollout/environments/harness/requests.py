"""Requests of OpenAI's chat and text completions: parsed, and refused where the answer would differ from OpenAI's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fp8rl.numerics.core.reading import parse_json
from fp8rl.rollout.chat import read_arguments
from fp8rl.rollout.lengths import text_size
from fp8rl.rollout.types import SamplingParams

MODEL = "policy"
"""The name of the model for programs, whatever it is."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_IGNORED = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"}
_COMMON = _IGNORED | {
    "model", "n", "max_tokens", "stop", "stream", "stream_options", "logprobs", "temperature", "top_p", "top_k",
    "min_p", "seed", "frequency_penalty", "presence_penalty",
}  # fmt: skip
_OF_CHAT = {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "max_completion_tokens",
    "top_logprobs", "chat_template_kwargs",
}  # fmt: skip
_MEANINGLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "stream": (True, False),
}
"""Settings, and all the values that they may have."""
_OF_A_FUNCTION = {"description": (str, "a text"), "parameters": (dict, "an object"), "strict": (bool, "true or false")}
"""The keys of a function of `tools` beside its name."""
MOST_STOPS = 128


class RefusedError(Exception):
    """A request that is not answered; the message names the cause."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclass(frozen=True)
class Ask:
    """A request."""

    max_tokens: int | None
    """Of the turn; None: as many as there is room for."""
    stop: tuple[str, ...]
    stream: bool
    usage: bool
    """A stream ends with the usage."""
    messages: tuple[dict[str, Any], ...] = ()
    """Of a chat, as a chat template reads them."""
    tools: tuple[dict[str, Any], ...] = ()
    """Of a chat, as a chat template reads them."""
    template: tuple[tuple[str, Any], ...] = ()
    """Arguments of the chat template."""
    calls: bool = False
    """Tools may be called."""
    prompt: str | tuple[int, ...] = ""
    """Text or tokens of a text completion."""

    @property
    def size(self) -> int:
        """The least bytes of text that become tokens: keys that a chat template may leave out are not counted."""
        calls = [call["function"] for message in self.messages for call in message.get("tool_calls", ())]
        read = [[message["content"] for message in self.messages], calls, self.tools, self.stop]
        return text_size([*read, self.prompt if isinstance(self.prompt, str) else ""])


def read(body: bytes, chat: bool, sampling: SamplingParams, override: Collection[str], vocabulary: int) -> Ask:
    """Parse a request body.

    sampling: of the run. override: settings of sampling that a request may name and that the run's replace.

    Raises RefusedError.
    """
    try:
        found = parse_json(body)
    except ValueError as error:
        raise RefusedError(f"body: found {error}, expected a JSON object") from error
    if not isinstance(found, dict):
        raise RefusedError(f"body: found {type(found).__name__}, expected a JSON object")
    found = {name: value for name, value in found.items() if value is not None}
    if found.get("model") != MODEL:
        raise RefusedError(
            f"The model {_brief(found.get('model'))} does not exist; a run serves {MODEL!r} (OPENAI_MODEL).",
            "model",
            404,
            "model_not_found",
        )
    for name in found.keys() - _COMMON - (_OF_CHAT if chat else {"prompt"}):
        raise RefusedError(f"{name[:80]}: is not supported for a program in training. Leave it out", name[:80])
    for name, values in _MEANINGLESS.items():
        if name in found and found[name] not in values:
            raise RefusedError(
                f"{name}: found {_brief(found[name])}, expected {' or '.join(map(repr, values))}, "
                "as all that is sampled is trained on. Leave it out",
                name,
            )
    if found.get("tool_choice", "auto") not in ("auto", "none"):
        if "tool_choice" not in override:
            raise RefusedError(
                f"tool_choice: found {_brief(found['tool_choice'])}, expected 'auto' or 'none', as a forced call would "
                "be sampled under a grammar. Have the program send 'auto'; or write tool_choice into "
                "environment.harness.override, and it is treated as 'auto'",
                "tool_choice",
            )
        found["tool_choice"] = "auto"
    _check_sampling(found, sampling, override)
    options = found.get("stream_options")
    settings: dict[str, Any] = {
        "max_tokens": _count(found),
        "stop": _stops(found.get("stop", ())),
        "stream": bool(found.get("stream")),
        "usage": bool(isinstance(options, dict) and options.get("include_usage")),
    }
    if not chat:
        return Ask(**settings, prompt=_prompt(found.get("prompt"), vocabulary))
    messages = found.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError(f"messages: found {_brief(messages)}, expected a list of messages", "messages")
    return Ask(
        **settings,
        messages=tuple(_message(message, f"messages.{number}") for number, message in enumerate(messages)),
        tools=_tools(found.get("tools", [])),
        template=_template(found.get("chat_template_kwargs", {})),
        calls=found.get("tool_choice") != "none" and bool(found.get("tools")),
    )


def _check_sampling(found: Mapping[str, Any], sampling: SamplingParams, override: Collection[str]) -> None:
    """Refuse other sampling than the run's: a token's log-probability is that of the run's distribution."""
    own = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "seed": None,
    }
    for name, value in own.items():
        if (
            name not in found
            or found[name] == value
            or name in override
            or (name != "seed" and not sampling.temperature)
        ):
            continue
        expected = "none: each conversation has one" if name == "seed" else f"{value:g}, that of the run"
        raise RefusedError(
            f"{name}: found {_brief(found[name])}, expected {expected}. Leave it out; or write {name} into "
            "environment.harness.override, and the program's value is ignored",
            name,
        )


def _count(found: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if name in found:
            if not isinstance(found[name], int) or isinstance(found[name], bool) or found[name] < 1:
                raise RefusedError(f"{name}: found {_brief(found[name])}, expected a whole number from 1", name)
            return int(found[name])
    return None


def _stops(found: Any) -> tuple[str, ...]:
    stops = [found] if isinstance(found, str) else found
    if (
        not isinstance(stops, list | tuple)
        or len(stops) > MOST_STOPS
        or not all(isinstance(stop, str) and stop for stop in stops)
    ):
        raise RefusedError(
            f"stop: found {_brief(found)}, expected a text or a list of up to {MOST_STOPS} texts, none of them empty",
            "stop",
        )
    return tuple(stops)


def _prompt(found: Any, vocabulary: int) -> str | tuple[int, ...]:
    if isinstance(found, str) and found:
        return found
    if isinstance(found, list) and found and all(type(token) is int and 0 <= token < vocabulary for token in found):
        return tuple(found)
    raise RefusedError(
        f"prompt: found {_brief(found)}, expected a text or a list of tokens from 0 to {vocabulary - 1}", "prompt"
    )


def _message(found: Any, place: str) -> dict[str, Any]:
    """Return a message as a chat template reads it: content is text, arguments of a call are an object."""
    role = found.get("role") if isinstance(found, dict) else found
    if not isinstance(found, dict) or not isinstance(role, str) or role not in _ROLES:
        raise RefusedError(f"{place}: found the role {_brief(role)}, expected {', '.join(_ROLES)}", place)
    message: dict[str, Any] = {"role": _ROLES[role], "content": _text(found.get("content"), place)}
    message |= {name: found[name] for name in ("name", "tool_call_id") if isinstance(found.get(name), str)}
    if found.get("tool_calls"):
        message["tool_calls"] = _calls(found["tool_calls"], place)
    return message


def _text(found: Any, place: str) -> str:
    if found is None or isinstance(found, str):
        return found or ""
    parts = found if isinstance(found, list) else [found]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise RefusedError(f"{place}.content: found {_brief(kind)}, expected text alone", place)
    return "".join(part["text"] for part in parts)


def _calls(found: Any, place: str) -> list[dict[str, Any]]:
    try:
        return [
            {
                "id": str(call.get("id", "")),
                "type": "function",
                "function": {
                    "name": str(call["function"]["name"]),
                    "arguments": read_arguments(call["function"].get("arguments")),
                },
            }
            for call in found
        ]
    except (TypeError, KeyError, AttributeError) as error:
        raise RefusedError(
            f"{place}.tool_calls: found {_brief(found)}, expected a list of calls of functions", place
        ) from error


def _tools(found: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(found, list):
        raise RefusedError(f"tools: found {_brief(found)}, expected a list of functions", "tools")
    for number, tool in enumerate(found):
        is_function = isinstance(tool, dict) and tool.get("type", "function") == "function"
        function = tool.get("function") if is_function else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RefusedError(f"tools.{number}: found {_brief(tool)}, expected a function with a name", "tools")
        for name, (kind, expected) in _OF_A_FUNCTION.items():
            if not isinstance(function.get(name), kind | None):
                place = f"tools.{number}.function.{name}"
                raise RefusedError(f"{place}: found {_brief(function[name])}, expected {expected}", "tools")
    return tuple(found)


def _template(found: Any) -> tuple[tuple[str, Any], ...]:
    known = isinstance(found, dict) and found.keys() <= {"enable_thinking"}
    if not known or not all(isinstance(value, bool) for value in found.values()):
        raise RefusedError(
            f"chat_template_kwargs: found {_brief(found)}, expected enable_thinking alone, true or false",
            "chat_template_kwargs",
        )
    return tuple(found.items())


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
