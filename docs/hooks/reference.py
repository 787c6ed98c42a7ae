"""Prints docs/reference.md, the page of all keys of a spec, or with --schema the JSON schema for editors.

Both are made of the sections: their types, bounds, defaults, and the text below each field.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import operator
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

from fp8rl.numerics.core.section import Located, Section, sections_in
from fp8rl.rl.algorithms import ALGORITHMS
from fp8rl.rl.algorithms.grpo import Grpo
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.rl.experiment.experiment import Experiment

_HEAD = """# Every key of a spec

`make pages` generates this page and `fp8rl/spec.schema.json` from the sections. Editors complete and check a spec that
begins with `# yaml-language-server: $schema=PATH/spec.schema.json`.

A spec is YAML. It inherits from a file, or a list of files, with `defaults: FILE`. Later files override earlier files,
mappings are merged, and lists are replaced. On the command line `section.key=value` overrides all files. If a file or
an override names another algorithm, environment or rejection, the settings of the replaced one are dropped, and a note
names them. A path is relative to its file; on the command line it is relative to the current directory. It may begin
with `~`. The error for a misspelt key names the nearest valid key. *required* means that there is no default.
"""
_NAMES = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text", types.NoneType: "null"}
_SIGNS = {Ge: ("ge", "≥"), Gt: ("gt", ">"), Le: ("le", "≤"), Lt: ("lt", "<")}


def reference() -> str:
    """The page, in Markdown."""
    parts = [_HEAD]
    shown: dict[type[Section], str] = {}
    for name, field in Experiment.model_fields.items():
        if name == "algorithm":
            parts.append(_algorithms())
            continue
        (section,) = sections_in(field.annotation)
        entry = " (a list; these are the keys of an entry)" if typing.get_origin(field.annotation) is tuple else ""
        shown[section] = name
        parts += [f"## {name}{entry}\n", f"{_text(section)}\n", _table(section, shown=shown, home=f"{name}.")]
    return "\n".join(parts)


class _UsersAlgorithm(Section):
    """A class of a user's, whose keys no schema knows."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(pattern=":")]


def schema() -> dict[str, Any]:
    """The JSON schema of a spec file. Nothing is required in it, as `defaults` may bring what is not there."""
    named: Any = functools.reduce(operator.or_, [*ALGORITHMS.values(), _UsersAlgorithm])
    spec: type[Experiment] = create_model("Spec", __base__=Experiment, algorithm=(named, Grpo()))
    found: dict[str, Any] = spec.model_json_schema()
    found["properties"]["defaults"] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    sections: list[type[Section]] = [Experiment, *_all_sections(Experiment), *_of_algorithms()]
    for section in dict.fromkeys(sections):
        made = found if section is Experiment else found["$defs"].get(section.__name__)
        if made is None:
            continue
        for name, said in descriptions(section).items():
            if (key := section.model_fields[name].alias or name) in made.get("properties", {}):
                made["properties"][key]["description"] = said
        if section.shorthand:
            alone = {key: value for key, value in made["properties"][section.shorthand].items() if key != "default"}
            found["$defs"][section.__name__] = {"anyOf": [alone, made]}
    plain: dict[str, Any] = _without(found, ("title", "required"))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "fp8rl spec"} | plain


def schema_text() -> str:
    """The schema as JSON, a section on a line."""
    whole = schema()
    sections = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(made, ensure_ascii=False)}" for name, made in whole.pop("$defs").items()
    )
    rest = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in whole.items())
    return f'{{{rest},\n"$defs": {{\n{sections}\n}}}}\n'


def descriptions(section: type[Section]) -> dict[str, str]:
    """Return the text below each field, by the field's name; of an inherited one, where it is not said anew."""
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if not issubclass(kind, Section) or kind is Section:
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_text(text):
                found[field.target.id] = " ".join(ast.literal_eval(text.value).split())  # type: ignore[attr-defined]
    return {name: text for name, text in found.items() if name in section.model_fields}


def rows(
    section: type[Section], prefix: str = "", shown: dict[type[Section], str] | None = None, home: str = ""
) -> Iterator[tuple[str, FieldInfo, str]]:
    """Key, field and description of each value in a section; those of a section inside it once, where it is first.

    shown: the sections that were there before, and under which key. home: what precedes the key in a spec.
    """
    said = descriptions(section)
    shown = {} if shown is None else shown
    for name, field in section.model_fields.items():
        key, inner = prefix + (field.alias or name), sections_in(field.annotation)
        again = "".join(f" It has the keys of `{shown[each]}`." for each in inner if each in shown)
        yield key, field, said[name] + again
        for each in inner:
            if each not in shown:
                shown[each] = home + key
                yield from rows(each, f"{key}.", shown, home)


def _algorithms() -> str:
    shared = {name for name in PolicyGradient.model_fields if name != "name"}
    nested: dict[type[Section], str] = {}
    known = {key: said for key, _, said in rows(PolicyGradient, "", nested, "algorithm.")}
    parts = [
        "## algorithm\n",
        f"`name` is {', '.join(f'`{name}`' for name in ALGORITHMS)}, or a class of your own, `path/to/file.py:Class` "
        "([extending.md](extending.md)). The default is `grpo`. [algorithms.md](algorithms.md) has more.\n",
        f"{_text(PolicyGradient)}\n",
        _table(PolicyGradient, only=shared),
    ]
    for name, kind in ALGORITHMS.items():
        base = PolicyGradient.model_fields
        own = {key for key, field in kind.model_fields.items() if key != "name" and not _alike(field, base.get(key))}
        parts += [f"### {name}\n", f"{_text(kind)} The loss of a token: `{kind.formula}`.\n"]
        parts += [_table(kind, only=own, shown={**nested}, known=known)] if own else []
    return "\n".join(parts)


def _alike(field: FieldInfo, other: FieldInfo | None) -> bool:
    return other is not None and (field.annotation, field.get_default()) == (other.annotation, other.get_default())


def _table(
    section: type[Section],
    only: set[str] | None = None,
    shown: dict[type[Section], str] | None = None,
    home: str = "",
    known: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the table of a section's keys. known: texts of keys that another table has, with another default."""
    lines = ["| key | values | default | |", "|---|---|---|---|"]
    for key, field, said in rows(section, shown=shown, home=home):
        if only is None or key.partition(".")[0] in only:
            said = "As above, with another default." if known.get(key) == said else said
            cells = [f"`{key}`", _values(field.annotation, field.metadata), _default(field), said]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _values(kind: Any, marks: list[Any]) -> str:
    """Return what a key may be, in words."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if located := [mark for mark in marks if isinstance(mark, Located)]:
        return located[0].says
    if origin is Annotated:
        return _values(parts[0], list(parts[1:]))
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if part is types.NoneType else _values(part, marks) for part in parts)
    if origin is tuple:
        return f"list of {'sections' if sections_in(kind) else _values(parts[0], []) + 's'}"
    if sections_in(kind):
        return "section"
    if origin is dict:
        return "mapping"
    bounds = [
        f"{sign} {getattr(mark, key)}" for mark in marks for of, (key, sign) in _SIGNS.items() if isinstance(mark, of)
    ]
    bounds += [f"at most {mark.max_length} characters" for mark in marks if isinstance(mark, MaxLen)]
    return " ".join([_NAMES[kind], *([", ".join(bounds)] if bounds else [])])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        value = value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, tuple):
        value = [
            each.model_dump(mode="json", exclude_defaults=True) if isinstance(each, Section) else each for each in value
        ]
    return f"`{json.dumps(value, ensure_ascii=False)}`".replace('`"', "`").replace('"`', "`")


def _text(kind: type[Section]) -> str:
    return " ".join((kind.__dict__.get("__doc__") or "").split())


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _all_sections(section: type[Section]) -> Iterator[type[Section]]:
    for field in section.model_fields.values():
        for inner in sections_in(field.annotation):
            yield inner
            yield from _all_sections(inner)


def _of_algorithms() -> Iterator[type[Section]]:
    for kind in ALGORITHMS.values():
        yield kind
        yield from _all_sections(kind)


def _without(value: Any, keys: tuple[str, ...]) -> Any:
    """Return the schema without the keys that say nothing to an editor; names of properties stay."""
    if isinstance(value, list):
        return [_without(each, keys) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: {name: _without(each, keys) for name, each in part.items()}
        if key in ("properties", "$defs")
        else _without(part, keys)
        for key, part in value.items()
        if key not in keys
    }


def main() -> None:
    """Print one of both."""
    wants_schema = "--schema" in sys.argv[1:]
    print(schema_text() if wants_schema else reference(), end="")


if __name__ == "__main__":
    main()
