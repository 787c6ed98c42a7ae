"""Merges the layers of a spec: a file over those that it inherits, an override over both.

In some sections the other keys depend on one, which names a member, such as an algorithm. Where a later layer names
another member, the section keeps what that member has too. Each key that is dropped is announced. A value that was the
former member's default becomes the new member's, and this is announced too: a resolved spec writes all defaults out.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union

from fp8rl.numerics.core.errors import UserError, shown
from fp8rl.numerics.core.section import Section, dotted, sections_in
from fp8rl.rl.algorithms import algorithm_class
from fp8rl.rl.algorithms.parts.corrections import BOUNDS
from fp8rl.rl.experiment.experiment import Experiment
from fp8rl.rl.experiment.sections import DataSource
from fp8rl.rollout.tasks.environments.config import HARNESS, VERIFIERS
from fp8rl.rollout.tasks.environments.functions import BUILT_IN
from fp8rl.rollout.tasks.environments.verifiers import Verifiers
from fp8rl.rollout.tasks.named_functions import check_importable, named_object, signature_of

Say = Callable[[str], object]
_NONE: Any = object()


def merged(base: dict[str, Any], layer: dict[str, Any], say: Say) -> dict[str, Any]:
    """Lay `layer` over `base`, both as YAML gives them: mappings are merged, all else is replaced.

    A value that stands for a section is the section with that one key. say: told of each setting of `base` that is
    dropped although `layer` does not name it: the section's new member has no such key, or a path alone names another
    source.
    """
    return _merged(base, layer, "", Experiment, say)


def _merged(base: dict[str, Any], layer: dict[str, Any], key: str, section: type[Section] | None, say: Say) -> Any:
    if key in MEMBERS and (selector := MEMBERS[key].selector) in layer:
        base = _of_member(key, base, layer[selector], say)
    found = dict(base)
    for name, value in layer.items():
        kind, listed = _section(section, name)
        before, after = (_spelled_out(each, kind, listed) for each in (base.get(name), value))
        found[name] = value
        if isinstance(before, dict) and isinstance(after, dict):
            inner = f"{key}.{name}".lstrip(".")
            if after is not value and kind is not None and issubclass(kind, DataSource):
                for part, each in dotted(before):
                    if part != kind.shorthand:
                        say(f"{inner}.{part}={shown(each)} is left out with its path; {inner}.path=PATH would keep it")
            else:
                found[name] = _merged(before, after, inner, kind, say)
        elif isinstance(before, list) and isinstance(after, dict) and kind is not None and issubclass(kind, DataSource):
            inner = f"{key}.{name}".lstrip(".")
            for index, source in enumerate(before):
                for part, each in dotted(source) if isinstance(source, dict) else ():
                    if part != kind.shorthand:
                        say(
                            f"{inner}.{index}.{part}={shown(each)} is left out: {inner} names one source now, in place "
                            f"of a list; {inner}=[...] names several"
                        )
    return found


def _section(section: type[Section] | None, name: str) -> tuple[type[Section] | None, bool]:
    """The section that a key of a section holds, and whether it is a list of them."""
    fields = {} if section is None else section.model_fields
    field = next((each for own, each in fields.items() if (each.alias or own) == name), None)
    if field is None:
        return None, False
    kinds = sections_in(field.annotation)
    return (kinds[0] if kinds else None), typing.get_origin(field.annotation) is tuple


def types_of(key: str) -> set[Any]:
    """Return the types of value that a dotted key takes; of a section with a `shorthand`, those of that too."""
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
    """A value that stands for a section, as the mapping that it stands for."""
    alone = (str,) if listed else (str, list)
    if kind is None or not kind.shorthand or not isinstance(value, alone):
        return value
    return {kind.shorthand: value}


def _of_member(key: str, settings: dict[str, Any], name: Any, say: Say) -> dict[str, Any]:
    """Keep the settings of the section `key` that its new member `name` has too; `settings` names the former member.

    say: told of each that is dropped. A name that is wrong is left to the validation.
    """
    member = MEMBERS[key]
    before = settings.get(member.selector)
    found = {part: value for part, value in settings.items() if part != member.selector}
    if not found or not isinstance(name, str) or name == before:
        return settings
    try:
        if ":" in name:
            check_importable(name, f"{key}.{member.selector}")
        has, now = member.has(name), member.default(name)
        was = member.default(None if ":" in str(before) else before)  # a user's file may be gone
    except UserError:
        return settings
    kept = _kept(found, has)
    staying = dict(dotted(kept))
    for part, value in dotted(found):
        if part not in staying:
            say(f"{key}.{part}={shown(value)} is left out: {name} has no such key")
    for part in [part for part in kept if was(part) not in (_NONE, now(part))]:
        if kept[part] == was(part):
            say(f"{key}.{part}: {shown(kept.pop(part))}, the default of {before}, becomes {now(part)}, that of {name}")
        else:
            say(f"{key}.{part}={shown(kept[part])} stays; the default of {name} is {now(part)}")
    return kept


def _kept(values: dict[str, Any], has: Callable[[str], bool], above: str = "") -> dict[str, Any]:
    return {
        name: _kept(value, has, f"{above}{name}.") if isinstance(value, dict) else value
        for name, value in values.items()
        if has(f"{above}{name}")
    }


@dataclass(frozen=True)
class _Members:
    """A section whose other keys depend on the member that one key names.

    `has` and `default` raise UserError where there is no such member.
    """

    selector: str
    """The key that names the member."""
    has: Callable[[str], Callable[[str], bool]]
    """Whether a member has a dotted key."""
    default: Callable[[Any], Callable[[str], Any]] = lambda name: lambda part: _NONE
    """The default of a key, or `_NONE`."""


def _algorithm_has(name: str) -> Callable[[str], bool]:
    fields = algorithm_class(name).model_fields
    return lambda part: part.partition(".")[0] in fields


def _algorithm_default(name: Any) -> Callable[[str], Any]:
    fields = {} if name is None else algorithm_class(name).model_fields

    def default(part: str) -> Any:
        field = fields.get(part)
        return _NONE if field is None or field.is_required() else field.get_default(call_default_factory=True)

    return default


def _environment_has(name: str) -> Callable[[str], bool]:
    takes = _keywords(name)

    def has(part: str) -> bool:
        first, _, rest = part.partition(".")
        if first == "harness":
            return name == HARNESS or (name == VERIFIERS and rest not in ("command", "program"))
        return first != "kwargs" or not rest or takes(rest.partition(".")[0])

    return has


def _keywords(environment: str) -> Callable[[str], bool]:
    """Return whether `kwargs` of an environment may have a name."""
    if environment == HARNESS:
        return lambda name: False
    key = "environment.function"
    call = Verifiers if environment == VERIFIERS else named_object(environment, key, BUILT_IN)
    parameters = signature_of(call, environment, key).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return lambda name: True
    return lambda name: name in parameters


MEMBERS = {
    "algorithm": _Members("name", _algorithm_has, _algorithm_default),
    "algorithm.rejection": _Members(
        "name",
        lambda name: lambda part: name not in BOUNDS or part in BOUNDS[name],
        lambda name: lambda part: BOUNDS.get(name, {}).get(part, _NONE),
    ),
    "environment": _Members("function", _environment_has),
}
"""The sections by their key."""
