"""Merges the layers of a spec: a file over those that it inherits, an override over both."""

from __future__ import annotations

import typing
from typing import Any

from fp8rl.numerics.errors import shown
from fp8rl.numerics.io.section import Section, sections_in
from fp8rl.rl.experiment.experiment import Experiment
from fp8rl.rl.experiment.members import MEMBERS, Say, leaves, of_member
from fp8rl.rl.experiment.sections import DataSource


def merged(base: dict[str, Any], layer: dict[str, Any], say: Say) -> dict[str, Any]:
    """`layer` over `base`, both as YAML gives them: mappings are merged, all else is replaced.

    A value that stands for a section is the section with that one key. say: told of each setting of `base` that goes
    although `layer` does not name it: another member of its section has no such key, or a path alone is another source.
    """
    return _merged(base, layer, "", Experiment, say)


def _merged(base: dict[str, Any], layer: dict[str, Any], key: str, section: type[Section] | None, say: Say) -> Any:
    if key in MEMBERS and (selector := MEMBERS[key].selector) in layer:
        base = of_member(key, base, layer[selector], say)
    found = dict(base)
    for name, value in layer.items():
        kind, listed = _section(section, name)
        before, after = (_spelled_out(each, kind, listed) for each in (base.get(name), value))
        found[name] = value
        if isinstance(before, dict) and isinstance(after, dict):
            inner = f"{key}.{name}".lstrip(".")
            if after is not value and kind is not None and issubclass(kind, DataSource):
                for part, each in leaves(before):
                    if part != kind.shorthand:
                        say(f"{inner}.{part}={shown(each)} is left out with its path; {inner}.path=PATH would keep it")
            else:
                found[name] = _merged(before, after, inner, kind, say)
    return found


def _section(section: type[Section] | None, name: str) -> tuple[type[Section] | None, bool]:
    """The section that a key of a section holds, and whether it is a list of them."""
    fields = {} if section is None else section.model_fields
    field = next((each for own, each in fields.items() if (each.alias or own) == name), None)
    if field is None:
        return None, False
    kinds = sections_in(field.annotation)
    return (kinds[0] if kinds else None), typing.get_origin(field.annotation) is tuple


def _spelled_out(value: Any, kind: type[Section] | None, listed: bool) -> Any:
    """A value that stands for a section, as the mapping that it stands for."""
    alone = (str,) if listed else (str, list)
    if kind is None or not kind.shorthand or not isinstance(value, alone) or str(value).startswith("${"):
        return value
    return {kind.shorthand: value}
