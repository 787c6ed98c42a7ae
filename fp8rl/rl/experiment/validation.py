"""Turns plain values into an :class:`Experiment`, or into one message that names each wrong key and its remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fp8rl.models import load_architecture
from fp8rl.numerics.core.errors import UserError, raise_first, shown, user_error
from fp8rl.numerics.core.section import Section, sections_in
from fp8rl.rl.algorithms import ALGORITHMS, READING, UnreadAlgorithm, algorithm_class
from fp8rl.rl.experiment.experiment import Experiment
from fp8rl.rl.experiment.gate_rules import gate_refusals
from fp8rl.rl.experiment.rules import refusals

REMOVED: dict[str, str] = {
    "rollout.speculation": "No engine drafts tokens any more.",
    "guard.fresh_answers": "A step scores 24 answers for later steps.",
    "guard.capsule_sequences": "A capsule has the 8 worst sequences.",
    "eval.sets.right_from": "An answer is right from a reward of 1 on.",
}
"""Removed keys, without the indices of lists, and what to do instead. A spec with a removed key is refused; the spec of
an old run is read without the key. A removed section needs no rows for the keys in it."""
_REFERENCE = re.compile(rf"(?<!\\)\$\{{(oc|{'|'.join(Experiment.model_fields)})\.[\w.]+[:}}]")
"""A reference to a key or an environment variable. Specs had them once; read as text, one would name a wrong file."""
_LONGEST_NUMBER = 1024
"""The longest whole number that a spec may have, in bits."""
_LONGEST_KEY = 160
"""Characters of an unknown key that a message shows; no valid key is so long."""
_LIKE, _LIKE_ELSEWHERE = 0.6, 0.8
"""Least similarity (`difflib`) of the key that a message proposes: in the same section, and in another section."""


def parse_experiment(values: dict[str, Any], *, imports: bool = True) -> Experiment:
    """Validate plain dicts, lists and scalars, as YAML gives them.

    imports: import a user's algorithm and architecture. Without them, the algorithm's settings and the module kinds of
        `numerics.scope` are not checked.
    Raises UserError: one line per wrong key, with the value found, the value expected and what to do.
    """
    check_plain(values)
    if imports and (file := named_architecture(values)) is not None:
        load_architecture(file)  # whose module kinds a scope may name
    try:
        experiment = Experiment.model_validate(values, context=None if imports else READING)
    except ValidationError as error:
        lines = [_explain(detail, values) for detail in _own(error.errors())]
        raise UserError("\n".join(dict.fromkeys(lines))) from None
    if isinstance(experiment.algorithm, UnreadAlgorithm):
        return experiment
    algorithm = experiment.algorithm.resolved(experiment.rollout)
    experiment = experiment.model_copy(update={"algorithm": algorithm})
    raise_first(refusals(experiment))
    raise_first(gate_refusals(experiment))
    return experiment


def named_architecture(values: dict[str, Any]) -> str | None:
    """The file that `model.architecture` names, if it is text."""
    model = values.get("model")
    file = model.get("architecture") if isinstance(model, dict) else None
    return file if isinstance(file, str) and file else None


def check_plain(value: Any, key: tuple[str, ...] = ()) -> None:
    """Refuse values that no file or command line could hold: text with NUL or half a surrogate pair (which an escape
    may spell), and numbers of more than 1024 bits. Refuse references such as ${run.name}, too."""
    if isinstance(value, dict):
        for name, inner in value.items():
            check_plain(name, key)
            check_plain(inner, (*key, str(name)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            check_plain(inner, (*key, str(index)))
    elif isinstance(value, str) and ("\0" in value or value.encode("utf-8", "replace").decode() != value):
        where = ".".join(key).encode("utf-8", "backslashreplace").decode()
        expected = "text without NUL" if "\0" in value else "text that UTF-8 can encode"
        raise user_error(where or "spec", found=value, expected=expected, remedy="Correct the text.")
    elif isinstance(value, str) and _REFERENCE.search(value):
        expected = "the value itself: a spec has no references any more, see CHANGELOG.md"
        raise user_error(".".join(key), value, expected, "Write the value, or use an anchor of YAML.")
    elif isinstance(value, int) and value.bit_length() > _LONGEST_NUMBER:
        expected = f"a number of at most {_LONGEST_NUMBER} bits"
        raise user_error(".".join(key), found=f"{value.bit_length()} bits", expected=expected, remedy="Correct it.")


def valid_keys(algorithm: str | None = None, section: type[Section] = Experiment, prefix: str = "") -> list[str]:
    """Return the dotted keys of a section at `prefix`, without indices of lists. algorithm: the only one counted."""
    keys: dict[str, None] = {}
    for name, field in section.model_fields.items():
        keys[prefix + name] = None
        inner: Iterable[type[Section]] = sections_in(field.annotation)
        if prefix + name == "algorithm":
            inner = ALGORITHMS.values() if algorithm is None else [algorithm_class(algorithm)]
        for below in inner:
            keys |= dict.fromkeys(valid_keys(algorithm, below, f"{prefix}{name}."))
    return list(keys)


def _own(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Drop pydantic's error that a list is too short if an error in an entry of the list is its only cause."""
    places = [detail["loc"] for detail in details]
    return [
        detail
        for detail, here in zip(details, places, strict=True)
        if detail["type"] != "too_short" or not any(there[: len(here)] == here != there for there in places)
    ]


def _explain(detail: ErrorDetails, values: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    kind, found = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        if (remedy := REMOVED.get(_without_indices(key))) is None:
            return _unknown_key(key, found, values)
        return f"{key}: found {shown(found, 60)}, expected nothing: this key has gone, see CHANGELOG.md. {remedy}"
    if kind == "missing":
        section = Experiment.model_fields[key].annotation if key in Experiment.model_fields else None
        needed = next((n for one in sections_in(section) for n, f in one.model_fields.items() if f.is_required()), "")
        key = f"{key}.{needed}" if needed else key
        return f"{key}: found nothing, expected a value. {_remedy('Add it to', key)}"
    if kind == "value_error":
        text = str(detail["ctx"]["error"])
        stated = text if text.startswith(f"{key}.") else f"{key}: {text}"  # a section's rule may name the key itself
        return stated if stated.endswith(("?", ".")) else f"{stated}."
    if kind == "string_type" and isinstance(found, bool | int | float):
        return f"{key}: found {shown(found)}, expected text. Write it in quotes, '{found}' for example."
    return f"{key}: found {shown(found)}, expected {expected_of(detail)}. {_remedy('Correct it in', key)}"


def expected_of(detail: ErrorDetails) -> str:
    """Return what pydantic expected, in words."""
    match detail["type"]:
        case "model_type" | "model_attributes_type" | "dict_type":
            return "a mapping of keys to values"
        case "tuple_type":
            return "a list"
        case "too_short":
            return f"a list of at least {detail['ctx']['min_length']}"
        case "string_pattern_mismatch":
            return f"text that matches {detail['ctx']['pattern']}"
    text = re.sub(r"^\w+ should (be|have) ", "", detail["msg"])
    return f"a number {text}" if text.startswith(("less", "greater")) else text


def _remedy(verb: str, key: str) -> str:
    in_list = any(part.isdigit() for part in key.split("."))
    return f"{verb} the spec file." if in_list else f"{verb} the spec file, or give {key}=VALUE on the command line."


def _unknown_key(key: str, found: Any, values: dict[str, Any]) -> str:
    if len(key) > _LONGEST_KEY:
        key = f"{key[:_LONGEST_KEY]}..."
    algorithm = values.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, dict) else "grpo"
    known = valid_keys(name if name in ALGORITHMS or ":" in str(name) else None)
    plain = _without_indices(key)
    section = plain.rpartition(".")[0]
    siblings = ", ".join(name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section)
    of = f"one of the keys of {str(name).rpartition(':')[2]}:" if section == "algorithm" and name else "one of"
    owners = [other for other in ALGORITHMS if section.startswith("algorithm") and plain in valid_keys(other)]
    if owners:
        meant = f"That key belongs to {', '.join(owners)}. "
    else:
        meant = f"Did you mean {near}? " if (near := nearest_key(key, known)) else ""
    return (
        f"{key}: found an unknown key with value {shown(found, 60)}, expected {of} {siblings}. "
        f"{meant}Correct or remove {key}."
    )


def nearest_key(key: str, known: list[str]) -> str:
    """Return the valid dotted key most like `key`; empty if none is. Tried in this order: its initials in the same
    section (`learning_rate`: `lr`), the same name anywhere, a similar name in the section, a similar name anywhere."""
    section, _, leaf = _without_indices(key).rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    leaves = [name.rpartition(".")[2] for name in known]
    if "_" in leaf and (initials := "".join(word[:1] for word in leaf.split("_"))) in siblings:
        return siblings[initials]
    if leaf not in leaves and (close := difflib.get_close_matches(leaf, siblings, n=1, cutoff=_LIKE)):
        return siblings[close[0]]
    alike = difflib.get_close_matches(leaf, leaves, n=1, cutoff=_LIKE_ELSEWHERE)
    same = [name for name, last in zip(known, leaves, strict=True) if last in alike]
    return difflib.get_close_matches(key, same, n=1, cutoff=0.0)[0] if same else ""


def _without_indices(key: str) -> str:
    return ".".join(part for part in key.split(".") if not part.isdigit())


def without_removed(value: Any, key: str = "") -> Any:
    """Return the values of an old run's spec without removed keys. key: the dotted key of `value`."""
    if isinstance(value, list):
        return [without_removed(entry, key) for entry in value]
    if not isinstance(value, dict):
        return value
    inner = {name: (f"{key}.{name}".lstrip("."), part) for name, part in value.items()}
    return {name: without_removed(part, below) for name, (below, part) in inner.items() if below not in REMOVED}
