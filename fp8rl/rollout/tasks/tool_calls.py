"""Finds tool calls in the model's turns by SGLang's parsers, and keeps texts in their arguments unchanged.

Formats such as GLM and Qwen3-Coder put a value between tags without its type. So 3.10 may be a text or a number. SGLang
first tries to read such a value as JSON, or always reads null. Here it stays a text if the tool's schema takes a text.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

_EDGE = "\ue000"
"""A character to put around a value. The value is then neither JSON nor null, and keeps the blanks at its ends."""
_TAGS = ("arg_value", "parameter", "param", "steptml:parameter")
"""The tags around values without their type."""


def parsers() -> list[str]:
    """Return the names of the formats in which models write calls."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser  # its imports take seconds

    return list(FunctionCallParser.ToolCallParserEnum)


def parse_calls(
    text: str, tools: Sequence[dict[str, Any]], parser: str, before: int
) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Return the text of a turn without its calls, and the calls in OpenAI's form. If none can be read: the whole text.

    before: number of earlier calls in this conversation. Ids continue from it, so they are the same in each run.
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
    # The templates of Mistral take ids of 9 letters and digits alone. Kimi K2 writes the ids itself.
    id_of = "functions.{name}:{number}" if parser == "kimi_k2" else "call{number:05}"
    return rest, tuple(
        {
            "id": id_of.format(name=call.name, number=before + number),
            "type": "function",
            "function": {"name": call.name or "", "arguments": call.parameters},
        }
        for number, call in enumerate(found)
    )


def read_calls(original: Callable[..., Any], parser: Any, text: str) -> tuple[str, list[Any]]:
    """Find the calls in a turn, with unchanged texts (around `FunctionCallParser.parse_non_stream`)."""
    from sglang.srt.function_call.utils import get_schema_properties

    marked = text
    for tag in _TAGS:
        before, end, after = marked.rpartition(f"</{tag}>")  # what begins in `before` has an end
        value = rf"(<{tag}(?:[ =][^<>]*)?>\n?)(.*?)(\n?</{tag}>)"
        marked = re.sub(value, rf"\1{_EDGE}\2{_EDGE}\3", before + end, flags=re.DOTALL) + after
    if marked == text:
        return original(parser, text)  # type: ignore[no-any-return]
    typed, literal = copy.deepcopy(parser), copy.deepcopy(parser)  # to `literal`, every argument is a text
    kinds: dict[tuple[str, str], set[str]] = {}
    for tool, other in zip(typed.tools, literal.tools, strict=True):
        schema, properties = tool.function.parameters, get_schema_properties(tool.function.parameters)
        kinds |= {(tool.function.name, name): _kinds(part, schema) for name, part in properties.items()}
        text_alone = {name: {"type": "string"} for name in properties}
        other.function.parameters = {"type": "object", "properties": text_alone}
        texts = {name: part for name, part in text_alone.items() if "string" in kinds[tool.function.name, name]}
        tool.function.parameters = {"type": "object", "properties": properties | texts}
    rest, calls = original(typed, text)
    for call, written in zip(calls, original(literal, marked)[1], strict=False):
        with suppress(ValueError):  # arguments that are no JSON have no such values
            arguments, letters = json.loads(call.parameters), json.loads(written.parameters)
            for name, value in letters.items() if call.name == written.name else ():
                taken = kinds.get((call.name, name), set())
                if "string" in taken and isinstance(value, str) and _EDGE in value:
                    value = value.replace(_EDGE, "")
                    arguments[name] = None if value == "null" and "null" in taken else value
                    call.parameters = json.dumps(arguments, ensure_ascii=False)
    return rest, calls


def _kinds(schema: Any, root: Any, depth: int = 8) -> set[str]:
    """Return the types that a JSON schema allows. For an enum, only string and null count. root: the whole schema."""
    if not isinstance(schema, dict) or not depth:
        return set()
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key) or ()]
    if path := str(schema.get("$ref", "")).split("/")[1:]:
        parts.append(reduce(lambda part, name: part.get(name) if isinstance(part, dict) else None, path, root))
    found = {"null"} if schema.get("nullable") else set()
    if named := schema.get("type"):
        found |= {named} if isinstance(named, str) else {*named}
    else:
        values = schema.get("enum") or [schema.get("const", 0)]
        found |= {"null" if value is None else "string" for value in values if value is None or isinstance(value, str)}
    return found.union(*(_kinds(part, root, depth - 1) for part in parts))


def hold_calls(original: Callable[..., Any], parser: Any, text: str) -> tuple[str, list[Any]]:
    """Stream the text of a turn, but not its calls (around `FunctionCallParser.parse_stream_chunk`)."""
    if not hasattr(parser, "turn"):
        parser.turn, parser.whole, parser.tools = "", copy.deepcopy(parser), copy.deepcopy(parser.tools)
        for tool in parser.tools:  # arguments are read at the end
            tool.function.parameters = None
    parser.turn += text
    return original(parser, text)[0], []


def give_calls(original: Callable[..., Any], parser: Any) -> tuple[str, list[Any]]:
    """Stream the calls at the end, when they are complete (around `FunctionCallParser.parse_stream_end`)."""
    rest, _ = original(parser)
    parser.detector.prev_tool_call_arr = []  # else SGLang would send what it takes for missing
    calls = parser.whole.parse_non_stream(parser.turn)[1] if parser.whole.has_tool_call(parser.turn) else []
    return rest, [call.model_copy(update={"tool_index": number}) for number, call in enumerate(calls)]
