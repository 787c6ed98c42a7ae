"""Tool calls in the model's turns, found by SGLang's parsers, with the texts of their arguments to the letter.

Formats such as GLM and Qwen3-Coder put a value between tags without its type: 3.10 may be a text or a number.
SGLang reads JSON there first, or null always. Where the tool's schema takes a text, the letters are the value.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

_EDGE = "\ue000"
"""Put around a value, so that it is neither JSON nor null, and no blank at its ends is left out."""
_VALUE = re.compile(r"(<(arg_value|parameter|param|steptml:parameter)(?:[ =][^>]*)?>\n?)(.*?)(\n?</\2>)", re.DOTALL)
"""A value whose type is not written."""


def parsers() -> list[str]:
    """Return the names of the formats that models write calls in."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser  # its imports take seconds

    return list(FunctionCallParser.ToolCallParserEnum)


def parse_calls(
    text: str, tools: Sequence[dict[str, Any]], parser: str, before: int
) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Return the text of a turn without its calls, and the calls as OpenAI writes them; all of the text if none can be
    read.

    before: calls of this conversation so far; ids go on from there, so that they are the same in each run.
    """
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.function_call.utils import normalize_json_schema_types

    known = [Tool.model_validate({"type": "function"} | copy.deepcopy(tool)) for tool in tools]
    for tool in known:
        normalize_json_schema_types(tool.function.parameters)
    read = FunctionCallParser(known, parser)
    if not read.has_tool_call(text):
        return text, ()
    rest, found = read_calls(FunctionCallParser.parse_non_stream, read, text)
    if not found:
        return text, ()
    return rest, tuple(
        {
            "id": f"call_{before + number}",
            "type": "function",
            "function": {"name": call.name or "", "arguments": call.parameters},
        }
        for number, call in enumerate(found)
    )


def read_calls(original: Callable[..., Any], parser: Any, text: str) -> tuple[str, list[Any]]:
    """Find the calls in a turn, with texts to the letter (around `FunctionCallParser.parse_non_stream`)."""
    marked = _VALUE.sub(rf"\1{_EDGE}\3{_EDGE}\4", text)
    if marked == text:
        return original(parser, text)  # type: ignore[no-any-return]
    schemas = {tool.function.name: tool.function.parameters for tool in parser.tools}
    letters = original(_with_texts(parser, lambda *_: True), marked)[1]
    rest, calls = original(_with_texts(parser, _takes), text)
    if [call.name for call in letters] == [call.name for call in calls]:
        for call, written in zip(calls, letters, strict=True):
            call.parameters = _to_the_letter(call.parameters, written.parameters, schemas.get(call.name))
    return rest, calls


def _with_texts(parser: Any, is_text: Callable[..., bool]) -> Any:
    """Copy a parser, which then takes some arguments of each tool for texts."""
    copied = copy.deepcopy(parser)
    for tool in copied.tools:
        schema = tool.function.parameters
        found = {name: {"type": "string"} if is_text(own, schema) else own for name, own in _arguments(schema).items()}
        tool.function.parameters = {"type": "object", "properties": found}
    return copied


def _to_the_letter(found: str, letters: str, schema: Any) -> str:
    """Return a call's arguments as they were found, but those that the schema takes as texts as they were written."""
    try:
        arguments, written = json.loads(found), json.loads(letters)
    except ValueError:
        return found
    for name, value in written.items():
        own = _arguments(schema).get(name, schema.get("additionalProperties") if isinstance(schema, dict) else None)
        if isinstance(value, str) and _EDGE in value and _takes(own, schema):
            text = value.replace(_EDGE, "")
            arguments[name] = None if text == "null" and _takes(own, schema, "null") else text
    return json.dumps(arguments, ensure_ascii=False)


def _arguments(schema: Any) -> dict[str, Any]:
    from sglang.srt.function_call.utils import get_schema_properties

    return get_schema_properties(schema)  # type: ignore[no-any-return]


def _takes(schema: Any, root: Any, kind: str = "string", depth: int = 8) -> bool:
    """Return True if a JSON schema, a part of `root`, says that it takes a value of this kind, `string` or `null`."""
    if not isinstance(schema, dict) or not depth:
        return False
    if "$ref" in schema:
        part = root
        for name in str(schema["$ref"]).split("/")[1:]:
            part = part.get(name) if isinstance(part, dict) else None
        return _takes(part, root, kind, depth - 1)
    if "type" in schema:
        named = _list(schema, "type") or [schema["type"]]
        return kind in named or (kind == "null" and schema.get("nullable") is True)
    values = [*_list(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in _list(schema, key)]
    return any(isinstance(value, {"string": str, "null": type(None)}[kind]) for value in values) or any(
        _takes(part, root, kind, depth - 1) for part in parts
    )


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    return found if isinstance(found := schema.get(key), list) else []


def hold_calls(original: Callable[..., Any], parser: Any, text: str) -> tuple[str, list[Any]]:
    """Stream a turn's text, and keep its calls back (around `FunctionCallParser.parse_stream_chunk`)."""
    if not hasattr(parser, "turn"):
        parser.turn, parser.whole = "", copy.deepcopy(parser)
    parser.turn += text
    return original(parser, text)[0], []


def give_calls(original: Callable[..., Any], parser: Any) -> tuple[str, list[Any]]:
    """Stream the calls at the end, where they can be read whole (around `FunctionCallParser.parse_stream_end`)."""
    rest, _ = original(parser)
    parser.detector.prev_tool_call_arr = []  # else SGLang would send what it takes for missing
    calls = parser.whole.parse_non_stream(parser.turn)[1] if parser.whole.has_tool_call(parser.turn) else []
    return rest, [call.model_copy(update={"tool_index": number}) for number, call in enumerate(calls)]
