"""Completions for the shell: keys of a spec and their values, names of runs, and models that can be planned.

It is light to import, as a key press must not wait for torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).parents[1] / "spec.schema.json"
CONFIGS = Path(__file__).parents[1] / "diagnose/plan/configs"


def complete_keys(args: list[str], incomplete: str) -> list[tuple[str, str]]:
    """Return each `key=` that begins so with its meaning; behind a key and `=`, the values that it may have.

    args: the words before. bash takes `=` for a word of its own.
    """
    keys = _keys()
    if args and args[-1] == "=":
        _, values = keys.get(args[-2] if len(args) > 1 else "", ("", []))
        return [(value, "") for value in values if value.startswith(incomplete)]
    key, given, begun = incomplete.partition("=")
    if given:
        return [(f"{key}={value}", "") for value in keys.get(key, ("", []))[1] if value.startswith(begun)]
    return [(f"{key}=", meaning) for key, (meaning, _) in keys.items() if key.startswith(incomplete)]


def complete_runs(incomplete: str) -> list[str]:
    """Return the names of runs in runs/, and the paths of others."""
    folder, _, begun = incomplete.rpartition("/")
    found = sorted(path.parent for path in Path(folder or "runs").glob("*/spec.yaml"))
    return [f"{folder}/{path.name}" if folder else path.name for path in found if path.name.startswith(begun)]


def complete_models(incomplete: str) -> list[str]:
    """Return the names of models that `fp8rl plan` knows, and the specs of the current directory."""
    names = [path.parent.name for path in CONFIGS.glob("*/config.json")]
    specs = [str(path) for folder in (".", "examples") for path in Path(folder).glob("*.yaml")]
    return [name for name in sorted(names) + sorted(specs) if name.startswith(incomplete)]


def _keys() -> dict[str, tuple[str, list[str]]]:
    """Return by each dotted key the first sentence of its meaning, and the values that the schema lists for it."""
    schema = json.loads(SCHEMA.read_text())
    found: dict[str, tuple[str, list[str]]] = {}
    for key, part in _walk(schema, schema["$defs"], ""):
        _, values = found.setdefault(key, (part.get("description", "").partition(". ")[0], []))
        values += [value for value in _listed(part) if value not in values]
    return found


def _walk(part: dict[str, Any], sections: dict[str, Any], before: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the keys that can be set one by one: not those of a list's entries, nor `defaults`."""
    for each in part.get("anyOf", ()):
        yield from _walk(each, sections, before)
    if "$ref" in part:
        yield from _walk(sections[part["$ref"].rpartition("/")[2]], sections, before)
    for name, inner in part.get("properties", {}).items():
        within = list(_walk(inner, sections, f"{before}{name}."))
        yield from within
        if name != "defaults" and (not within or _stands_alone(inner, sections)):
            yield before + name, inner


def _stands_alone(part: dict[str, Any], sections: dict[str, Any]) -> bool:
    """Return whether a value that is no mapping may stand for a section, such as a path for `data.train`."""
    if "$ref" in part:
        part = sections[part["$ref"].rpartition("/")[2]]
    return part.get("type") in ("string", "array") or any(
        _stands_alone(each, sections) for each in part.get("anyOf", ())
    )


def _listed(part: dict[str, Any]) -> Iterator[str]:
    if part.get("type") == "boolean":
        yield from ("true", "false")
    yield from map(str, part.get("enum", ()))
    if "const" in part:
        yield str(part["const"])
    for each in part.get("anyOf", ()):
        yield from _listed(each)
