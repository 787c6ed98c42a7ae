"""Tool calls in the model's turns, found by SGLang's parsers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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

    read = FunctionCallParser([Tool.model_validate({"type": "function"} | tool) for tool in tools], parser)
    if not read.has_tool_call(text):
        return text, ()
    rest, found = read.parse_non_stream(text)
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
