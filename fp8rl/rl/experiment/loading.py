"""Makes an :class:`Experiment` from a YAML file, the files that it inherits, and `key.sub=value` overrides."""

from __future__ import annotations

import functools
import json
import numbers
import os
import re
import shlex
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union

from fp8rl.models.plain_yaml import comment_behind, parse_override, parse_yaml, write_yaml
from fp8rl.numerics.core.errors import UserError, say_error, shown, user_error
from fp8rl.numerics.core.reading import at_home, check_path, read_text
from fp8rl.numerics.core.section import Section, sections_in
from fp8rl.rl.experiment.experiment import Experiment
from fp8rl.rl.experiment.sections import DataSource
from fp8rl.rl.experiment.validation import named_architecture, parse_experiment, without_removed
from fp8rl.rl.record.run_dir import RunDir

Say = Callable[[str], object]
MEMBERS = {"algorithm": "name", "algorithm.rejection": "name", "environment": "function"}
"""Sections in which one key chooses what the section configures, such as an algorithm, and the other keys depend on it.
If a later layer chooses another value, it replaces the whole section. So does a path in place of a data source."""
_HERE = Path("(a mapping)")
"""The name in messages for a spec that is a mapping and not a file; its paths are relative to the current directory."""
LARGEST_SPEC = 16 << 20
"""The largest file of a spec, in bytes."""
_GONE = ("tracking/wandb_lost", "perf/accepted_per_forward", "perf/drafted_per_forward")
"""Metrics that runs had once; a gate of an old run may name one."""


def note(text: str) -> None:
    """Print a note to the standard error."""
    say_error(f"note: {text}")


def load_experiment(
    spec: str | Path | Mapping[str, Any] | Experiment, overrides: Sequence[str] = (), say: Say = note
) -> Experiment:
    """Read, inherit, override and validate a spec: a YAML file, a mapping with the same keys, or an experiment.

    Later layers win: each file of `defaults:` in order, the file itself, then `overrides` such as `"run.steps=2"`.
    Mappings are merged and lists are replaced. If a layer names another algorithm, environment, rejection or data path,
    the settings of the former one are dropped, and `say` prints which settings. The spec in a run's directory may have
    keys that have been removed since: they are left out.
    A relative path is relative to the directory of the file that it is written in. In an override, in a mapping, and
    for the default of `run.dir`, it is relative to the current directory. In the experiment all paths are absolute.
    Raises UserError: the file cannot be read, or a key or value is wrong.
    """
    if isinstance(spec, Experiment):
        spec = spec.to_dict()
    if isinstance(spec, Mapping):
        path, values = _HERE, _values(_as_yaml(spec), _HERE)
    else:
        check_path(spec, "spec")
        path = Path(at_home(str(spec)))
        values = _read_yaml(path)
        if RunDir(path.absolute().parent).mark.is_file():  # a run's spec has every key, also keys removed since
            values = _without_what_went(values)
    return compose_experiment(_inherited(values, path, (), say), overrides, say)


def compose_experiment(values: dict[str, Any], overrides: Sequence[str], say: Say = note) -> Experiment:
    """Make an experiment from `values` as `load_experiment` makes it from a file."""
    values = merged({"run": {"dir": str(Path.cwd() / "runs")}}, values, say)
    names = {f"{section}.{key}" for section, key in MEMBERS.items()}  # a name first, then its settings
    for override in sorted(overrides, key=lambda text: text.partition("=")[0] not in names):
        values = merged(values, Experiment.located(_parse_override(override), Path.cwd()), say)
    return parse_experiment(values)


def architecture_of(overrides: Sequence[str]) -> str | None:
    """Return the value of `model.architecture` in overrides, for models that are read before there is a spec."""
    values: dict[str, Any] = {}
    for override in overrides:
        if override.startswith("model.architecture="):
            values = Experiment.located(_parse_override(override), Path.cwd())
    return named_architecture(values)


def read_resolved(path: str | Path) -> Experiment:
    """Read the `spec.yaml` of a run directory. Paths stay as they are. Keys that have been removed since are left out.

    It imports no code that the spec names, not even an architecture, because the run may be somebody else's. A caller
    that computes with the model loads the architecture itself.
    Raises UserError: the file cannot be read, or a key or value is wrong; the message names the file.
    """
    try:
        return parse_experiment(_without_what_went(_read_yaml(Path(path))), imports=False)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _without_what_went(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of an old run's spec without the keys and values that have been removed since."""
    values = without_removed(values)
    tracking, gates = values.get("tracking"), values.get("gates")
    if isinstance(tracking, dict) and isinstance(tracking.get("to"), list):  # MLflow and Trackio were trackers once
        tracking["to"] = [name for name in tracking["to"] if name not in ("mlflow", "trackio")]
    if isinstance(gates, list):
        values["gates"] = [gate for gate in gates if not isinstance(gate, dict) or gate.get("metric") not in _GONE]
    return values


def _inherited(layer: dict[str, Any], path: Path, ancestors: tuple[Path, ...], say: Say) -> dict[str, Any]:
    """Return the values of the file at `path`, merged over the values of the files that its `defaults:` names. These
    names are relative to the file."""
    resolved = path.resolve()
    if resolved in ancestors:
        chain = " -> ".join(str(entry) for entry in (*ancestors, resolved))
        raise user_error("defaults", found=str(path), expected="no cycle", remedy=f"Break the cycle {chain}.")
    located = Experiment.located(layer, path.absolute().parent)
    names = located.pop("defaults", [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        remedy = "Write defaults: base.yaml, relative to this file."
        raise user_error(f"defaults of {path}", names, "a file name or a list of file names", remedy)
    values: dict[str, Any] = {}
    for name in names:
        check_path(name, f"defaults of {path}")
        inherited = path.parent / at_home(name)
        if not inherited.is_file():
            remedy = f"Correct the name; it was looked for in {resolved.parent}."
            raise user_error(f"defaults of {path}", name, "an existing YAML file, relative to this one", remedy)
        values = merged(values, _inherited(_read_yaml(inherited), inherited, (*ancestors, resolved), say), say)
    return merged(values, located, say)


def _read_yaml(path: Path) -> dict[str, Any]:
    return _values(read_text(path, "spec", "an existing YAML file", "Give the path of a spec.", LARGEST_SPEC), path)


def _as_yaml(spec: Mapping[str, Any]) -> str:
    """Return a mapping as YAML text."""
    try:
        return write_yaml(json.loads(json.dumps(dict(spec), default=plain)))
    except UserError:
        raise
    except (TypeError, ValueError, RecursionError) as error:  # keys that are no text, a mapping that holds itself
        raise user_error(
            "spec", found=str(error), expected="a mapping of plain values", remedy="Write only values of YAML."
        ) from error


def plain(value: Any) -> Any:
    """Convert a path, mapping, section or numpy number to JSON's types, for `json.dumps(default=plain)`. Raises
    UserError: the value is something else."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise user_error(
        "spec", value, "plain values, as a YAML file has them", "Name a function or class as path/to/file.py:name."
    )


def _values(text: str, path: Path) -> dict[str, Any]:
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise user_error(f"spec {path}", str(error), "valid YAML of plain values", "Correct the file.") from error
    wrong = [key for key in values if not isinstance(key, str)] if isinstance(values, dict) else [values]
    if wrong:
        found = "nothing" if wrong[0] is None else wrong[0]
        raise user_error(
            f"spec {path}", found, "a mapping of section names", "Start from one that `fp8rl init` has written."
        )
    return values


def _parse_override(override: str) -> dict[str, Any]:
    key, separator, value = override.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", key):
        raise user_error(
            "override", override, "key.sub=value", "Write for example run.steps=2; replace a whole list with gates=[]."
        )
    quoted = f"{key}={json.dumps(value, ensure_ascii=False)}"
    if comment := comment_behind(value):
        expected = f"a value that YAML reads to its end; it takes {shown(comment)} for a comment"
        raise user_error("override", override, expected, f"Quote the value for YAML: {shlex.quote(quoted)}.")
    types = types_of(key)
    text_alone = bool(types) and types <= {str, NoneType}
    try:
        found = parse_override(override)
    except ValueError as error:
        if text_alone and value.isprintable() and value[0] not in "'\"":
            return parse_override(quoted)
        expected = f"a YAML value after = ({error})"
        raise user_error("override", found=override, expected=expected, remedy="Correct or quote the value.") from error
    read: Any = functools.reduce(dict.__getitem__, key.split("."), found)
    taken = types if text_alone else {*types, dict, list, NoneType}
    return parse_override(quoted) if str in types and type(read) not in taken else found  # 12345 and no are texts then


def merged(
    base: dict[str, Any], layer: dict[str, Any], say: Say, key: str = "", kind: type[Section] | None = Experiment
) -> dict[str, Any]:
    """Return `base` with the values of `layer`, both as YAML gives them: mappings are merged, all else is replaced.

    A plain value in place of a section sets the section's `shorthand` key. say: prints the settings that are dropped
    with a former algorithm, environment, rejection or source. key, kind: the section that the values are of.
    """
    selector = MEMBERS.get(key, "")
    if None not in (base.get(selector), layer.get(selector)) and base[selector] != layer[selector]:
        _say_gone(key, selector, base, say)
        base = {}
    found = dict(base)
    for name, value in layer.items():
        section, listed = _section(kind, name)
        inner = f"{key}.{name}".lstrip(".")
        before, after = (_spelled_out(given, section, listed) for given in (base.get(name), value))
        is_source = section is not None and issubclass(section, DataSource)
        found[name] = value
        if is_source and (after is not value or isinstance(before, list)):
            for source in before if isinstance(before, list) else [before]:
                _say_gone(inner, "path", source, say)
        elif isinstance(before, dict) and isinstance(after, dict):
            found[name] = merged(before, after, say, inner, section)
    return found


def _say_gone(key: str, selector: str, settings: Any, say: Say) -> None:
    others = [name for name in settings if name != selector] if isinstance(settings, dict) else []
    if others:
        say(f"{key}: settings of {settings.get(selector)} are left out: {', '.join(map(str, others))}")


def _annotation(section: type[Section] | None, name: str) -> Any:
    """Return the type of a section's key; None: it has no such key."""
    field = None if section is None else section.model_fields.get(name)
    return None if field is None else field.annotation


def _section(section: type[Section] | None, name: str) -> tuple[type[Section] | None, bool]:
    """Return the class of the section that is the value of a key, and whether the value is a list of such sections."""
    annotation = _annotation(section, name)
    return next(iter(sections_in(annotation)), None), typing.get_origin(annotation) is tuple


def types_of(key: str) -> set[Any]:
    """Return the types of value that a dotted key takes. A section also takes the types of its `shorthand`."""
    section: type[Section] | None = Experiment
    *above, name = key.split(".")
    for part in above:
        section, _ = _section(section, part)
    annotation = _annotation(section, name)
    return set() if annotation is None else _types(annotation)


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
    """Return the mapping that a value in place of a section stands for; any other value unchanged."""
    alone = (str,) if listed else (str, list)
    if kind is None or not kind.shorthand or not isinstance(value, alone):
        return value
    return {kind.shorthand: value}
