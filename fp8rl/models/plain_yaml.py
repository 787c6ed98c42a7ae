"""Reads and writes YAML that has only plain values: mappings, lists, text, numbers, true, false and null."""

from __future__ import annotations

import re
from typing import Any

import yaml

DEEPEST = 50
"""The deepest nesting of lists and mappings. No spec needs more, and deep nesting overflows libyaml's stack, which ends
the process."""
MOST_VALUES = 1_000_000
"""The most values of a text, with all values that its aliases stand for."""
_TEXT = "tag:yaml.org,2002:str"
_OF_OLD = re.compile(r"[-+]?0[0-7_]+|[-+]?[1-9][\d_]*(:[0-5]?\d)+|[-+]?\d[\d_]*(:[0-5]?\d)+\.[\d_]*")
"""Numbers that YAML 1.1 reads otherwise than people do: 010 is 8, and 12:30 is 750."""


class _Loader(yaml.CSafeLoader):
    """Reads 1e-3 as a number and a date as text, and refuses a key that a mapping has twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == _TEXT and key.value in seen:
                raise yaml.MarkedYAMLError(None, None, f"found duplicate key {key.value}", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Quotes a text that `_Loader` would read as a number, such as the name 1e-3."""


for _end in (_Loader, _Dumper):
    _end.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def parse_yaml(text: str) -> Any:
    """Return the value that a YAML text stands for. Raises ValueError, which says what is wrong, and where."""
    try:
        check_yaml(text)
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        if isinstance(error, yaml.MarkedYAMLError) and mark is not None:
            where = f"in line {mark.line + 1}, column {mark.column + 1}"
            raise ValueError(f"{error.problem or error.context} {where}") from error
        raise ValueError(" ".join(str(error).split())) from error


def write_yaml(value: Any) -> str:
    """Return the YAML text of a value of plain values. `parse_yaml` gives an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_override(text: str) -> dict[str, Any]:
    """Return the mapping that `key.sub=value` stands for. Raises ValueError, as `parse_yaml` does."""
    key, _, value = text.partition("=")
    found = parse_yaml(value)
    for part in reversed(key.split(".")):
        found = {part: found}
    return found


def comment_behind(text: str) -> str:
    """Return the comment after a value. YAML drops it, but in an override it was meant as text. Return "" if there is
    no comment, or if the text is no YAML."""
    end = 0
    try:
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            begin, stop = event.start_mark, event.end_mark
            assert begin is not None and stop is not None, "libyaml marks all events"
            is_bracket = isinstance(event, yaml.CollectionEndEvent) and begin.index < stop.index
            if is_bracket or isinstance(event, yaml.ScalarEvent | yaml.AliasEvent):
                end = stop.index
    except (yaml.YAMLError, ValueError):
        return ""
    return text[end:].strip()


def check_yaml(text: str, ours: bool = True) -> None:
    """Refuse a text that is no YAML, or has other than plain values, before any value is built from it.

    ours: the text is a spec or an override. Other files may have numbers such as 010 and 12:30.

    Raises:
        ValueError: the text is nested too deep, stands for too many values, contains itself, or has a tag; or it is
            ours and has such a number.
        yaml.YAMLError: the text is no YAML.
    """
    sizes: dict[str, int] = {}
    """Number of values that each anchor stands for; an anchor is missing while its value is being read."""
    open_at: list[tuple[str | None, int]] = []
    count = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"the alias *{event.anchor}, whose anchor is missing or not complete before it")
            count += sizes[event.anchor]
        elif isinstance(event, yaml.NodeEvent):
            tag = getattr(event, "tag", None)
            if tag not in (None, "!", _TEXT):
                raise ValueError(f"the tag {tag}")
            if ours and isinstance(event, yaml.ScalarEvent) and event.implicit[0] and _OF_OLD.fullmatch(event.value):
                text, number, line = event.value, yaml.safe_load(event.value), getattr(event.start_mark, "line", 0) + 1
                raise ValueError(
                    f"{text} in line {line}, which YAML reads as {number}: write {number}, or '{text}' as text"
                )
            count += 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_at.append((event.anchor, count - 1))
            elif event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_at.pop()
            if anchor:
                sizes[anchor] = count - before
        if len(open_at) > DEEPEST:
            raise ValueError(f"lists and mappings nested more than {DEEPEST} deep")
        if count > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES} values")
