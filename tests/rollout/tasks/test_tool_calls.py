"""Texts of tool calls are what the model wrote; the oracle is the text between the tags."""

import json
import re
from collections.abc import Callable, Mapping
from functools import partialmethod
from typing import Any

import pytest

from fp8rl.rollout.tasks import tool_calls
from fp8rl.rollout.tasks.tool_calls import parse_calls

module = pytest.importorskip("sglang.srt.function_call.function_call_parser")
protocol = pytest.importorskip("sglang.srt.entrypoints.openai.protocol")

TEXTS = ["3.10", "true", "null", "None", '"q"', "'q'", "007", "1e5", "[1]", '{"a": 1}', " x ", "a\nb", "", "f()"]
SCHEMAS: dict[str, tuple[dict[str, Any], bool]] = {
    "text": ({"type": "string"}, False),
    "text or null": ({"type": ["null", "string"]}, True),
    "text or number": ({"anyOf": [{"type": "number"}, {"type": "string"}]}, False),
    "reference": ({"anyOf": [{"$ref": "#/$defs/V"}, {"type": "null"}]}, True),
    "listed": ({"enum": ["a", None]}, True),
    "of a database": ({"type": "varchar(9)"}, False),
}
"""By name, a schema, and whether it takes null."""


def _keys(between: str) -> str:
    return f"<arg_key>{{}}</arg_key>{between}<arg_value>{{}}</arg_value>"


_NAMED = '<parameter name="{}">{}</parameter>'
FORMS = {
    "glm45": ("<tool_call>f\n", _keys("\n") + "\n", "</tool_call>"),
    "glm47": ("<tool_call>f", _keys(""), "</tool_call>"),
    "spark25": ("<tool_call>f\n", _keys(""), "\n</tool_call>"),
    "poolside_v1": ("<tool_call>f\n", _keys("\n") + "\n", "</tool_call>"),
    "hunyuan": ("<tool_calls><tool_call>f<tool_sep>\n", _keys("\n") + "\n", "</tool_call></tool_calls>"),
    "qwen3_coder": ("<tool_call>\n<function=f>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n</tool_call>"),
    "mimo": ("<tool_call>\n<function=f>\n", "<parameter={}>{}</parameter>\n", "</function>\n</tool_call>"),
    "dots": ('<dots_function_call><invoke name="f">', _NAMED, "</invoke></dots_function_call>"),
    "minimax-m2": ('<minimax:tool_call><invoke name="f">', _NAMED, "</invoke></minimax:tool_call>"),
    "minicpm5": ('<function name="f">', '<param name="{}">{}</param>', "</function>"),
    "step3": (
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">\n',
        '<steptml:parameter name="{}">{}</steptml:parameter>\n',
        "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
    ),
}
"""By SGLang's name of a format, the beginning of a call of `f`, an argument's name and value, and the end."""


def tool(own: dict[str, Any]) -> dict[str, Any]:
    named = {name: schema for name, (schema, _) in SCHEMAS.items()}
    schema = {"properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}, **named, **own}}
    further = {"$defs": {"V": {"type": "string", "enum": ["3.1"]}}}
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema, **further}}}


def written(form: str, arguments: Mapping[str, str]) -> str:
    begin, each, end = FORMS[form]
    return begin + "".join(each.format(name, value) for name, value in arguments.items()) + end


def expected(value: str) -> dict[str, Any]:
    return {name: None if takes_null and value == "null" else value for name, (_, takes_null) in SCHEMAS.items()}


@pytest.mark.parametrize("form", FORMS)
def test_texts_of_arguments_stay_as_they_were_written(form: str) -> None:
    """Where the schema takes them; a number and a truth value are still such."""
    count = 1 if form == "step3" else 2
    for value in TEXTS:
        text = "so " + written(form, {"n": "3", "b": "true", **dict.fromkeys(SCHEMAS, value)}) * count
        rest, calls = parse_calls(text, [tool({})], form, 0)
        assert rest.strip() == "so" and len(calls) == count
        for call in calls:
            assert json.loads(call["function"]["arguments"]) == {"n": 3, "b": True} | expected(value)


def test_texts_whose_type_the_format_writes_are_left_alone() -> None:
    arguments = {"n": 3, "text": "</parameter> null", "text or null": "null", "text or number": 3.1}
    text = "<tool_call>\n" + json.dumps({"name": "f", "arguments": arguments}) + "\n</tool_call>"
    _, (call,) = parse_calls(text, [tool({})], "qwen25", 0)
    assert json.loads(call["function"]["arguments"]) == arguments


@pytest.mark.parametrize(
    ("form", "ids"), [("qwen25", ["call00009", "call00010"]), ("kimi_k2", ["functions.f:9", "functions.f:10"])]
)
def test_calls_have_ids_that_the_templates_take(form: str, ids: list[str]) -> None:
    """Those of Mistral refuse all but 9 letters and digits. That of Kimi K2 writes the ids, as the model knows them."""
    texts = {
        "qwen25": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n',
        "kimi_k2": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    }
    text = texts[form] * 2
    if form == "kimi_k2":
        text = f"<|tool_calls_section_begin|>{text}<|tool_calls_section_end|>"
    assert [call["id"] for call in parse_calls(text, [tool({})], form, 9)[1]] == ids


@pytest.mark.parametrize("form", ["glm45", "glm47", "qwen3_coder", "mimo", "minimax-m2"])
def test_a_stream_brings_the_same_calls(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the server's hooks have it. A tag is a token, as in these models' vocabularies."""
    parser = module.FunctionCallParser

    def hook(name: str, function: Callable[..., Any]) -> None:
        original = getattr(parser, name)
        monkeypatch.setattr(parser, name, partialmethod(lambda self, *given: function(original, self, *given)))

    hook("parse_non_stream", tool_calls.read_calls)
    hook("parse_stream_chunk", tool_calls.hold_calls)
    hook("parse_stream_end", tool_calls.give_calls)
    for value in TEXTS:
        text = "so " + written(form, {"n": "3", "b": "true", **dict.fromkeys(SCHEMAS, value)}) * 2
        known = protocol.Tool.model_validate(tool({"of a database": {"type": "string"}}))
        streaming, said, calls = parser([known], form), "", []
        for token in re.findall(r"<[^>]*>|[^<]{1,5}|<", text):
            more, found = streaming.parse_stream_chunk(token)
            said, calls = said + more, [*calls, *found]
        more, found = streaming.parse_stream_end()
        assert (said + more).strip() == "so" and not calls and [call.tool_index for call in found] == [0, 1]
        assert all(json.loads(call.parameters) == {"n": 3, "b": True} | expected(value) for call in found)
