"""Merges the layers of a spec: a file over the files that it inherits, and overrides over both.

In some sections one key, such as the algorithm's name, decides which other keys there are. Where a later layer gives
that key another value, its section replaces the earlier section. So does a path that replaces a data source.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Literal, Union

from fp8rl.numerics.core.section import Section, sections_in
from fp8rl.rl.experiment.experiment import Experiment
from fp8rl.rl.experiment.sections import DataSource

Say = Callable[[str], object]
MEMBERS = {"algorithm": "name", "algorithm.rejection": "name", "environment": "function"}
"""The key that decides which other keys a section has, by section."""


def merged(base: dict[str, Any], layer: dict[str, Any], say: Say) -> dict[str, Any]:
    """Merge `layer` over `base`, both as YAML gives them: mappings are merged, all other values are replaced.

    A single value in place of a section means the section with that value for its `shorthand` key. say: is told which
    settings are dropped with a former algorithm, environment, rejection or data source.
    """
    return _merged(base, layer, "", Experiment, say)


def _merged(base: dict[str, Any], layer: dict[str, Any], key: str, section: type[Section] | None, say: Say) -> Any:
    selector = MEMBERS.get(key, "")
    if None not in (base.get(selector), layer.get(selector)) and base[selector] != layer[selector]:
        _say_gone(key, selector, base, say)
        base = {}
    found = dict(base)
    for name, value in layer.items():
        kind, listed = _section(section, name)
        inner = f"{key}.{name}".lstrip(".")
        before, after = (_spelled_out(each, kind, listed) for each in (base.get(name), value))
        is_source = kind is not None and issubclass(kind, DataSource)
        found[name] = value
        if is_source and (after is not value or isinstance(before, list)):
            for source in before if isinstance(before, list) else [before]:
                _say_gone(inner, "path", source, say)
        elif isinstance(before, dict) and isinstance(after, dict):
            found[name] = _merged(before, after, inner, kind, say)
    return found


def _say_gone(key: str, selector: str, settings: Any, say: Say) -> None:
    others = [name for name in settings if name != selector] if isinstance(settings, dict) else []
    if others:
        say(f"{key}: settings of {settings.get(selector)} are left out: {', '.join(map(str, others))}")


def _section(section: type[Section] | None, name: str) -> tuple[type[Section] | None, bool]:
    """Return the type of section that the key `name` holds, or None; and whether it holds a list of such sections."""
    fields = {} if section is None else section.model_fields
    field = next((each for own, each in fields.items() if (each.alias or own) == name), None)
    if field is None:
        return None, False
    kinds = sections_in(field.annotation)
    return (kinds[0] if kinds else None), typing.get_origin(field.annotation) is tuple


def types_of(key: str) -> set[Any]:
    """Return the types of value that a dotted key takes; for a section with a `shorthand`, also that key's types."""
    section: type[Section] | None = Experiment
    *above, name = key.split(".")
    for part in above:
        section, _ = _section(section, part)
    field = section.model_fields.get(name) if section is not None else None
    return set() if field is None else _types(field.annotation)


def _types(annotation: Any) -> set[Any]:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return {type(part) for part in parts}
    if origin in (Annotated, Union, UnionType):
        return set().union(*map(_types, parts[:1] if origin is Annotated else parts))
    if isinstance(annotation, type) and issubclass(annotation, Section) and annotation.shorthand:
        return {annotation, *_types(annotation.model_fields[annotation.shorthand].annotation)}
    listed = _types(parts[0]) if origin is tuple and sections_in(annotation) else set()
    return {int, float} if annotation is float else {origin or annotation, *listed}


def _spelled_out(value: Any, kind: type[Section] | None, listed: bool) -> Any:
    """Return a single value in place of a section as the mapping {shorthand: value}; other values unchanged."""
    alone = (str,) if listed else (str, list)
    if kind is None or not kind.shorthand or not isinstance(value, alone):
        return value
    return {kind.shorthand: value}
