"""Removed keys: a new spec with one is refused, with a sentence; the spec of an old run is read without it.

A row has the dotted key, without the indices of lists, and the sentence that says what to do. A row for a section
covers all keys of the section.
"""

from __future__ import annotations

from typing import Any

REMOVED: dict[str, str] = {
    "rollout.speculation": "No engine drafts tokens any more.",
    "guard.fresh_answers": "A step scores 24 answers to later steps.",
    "guard.capsule_sequences": "A capsule has the 8 worst sequences.",
    "eval.sets.right_from": "An answer is right from a reward of 1 on.",
}


def refusal_of_removed(key: str, found: str) -> str | None:
    """Return the message on a removed key. found: its value as text. None: specs never had such a key."""
    remedy = REMOVED.get(".".join(part for part in key.split(".") if not part.isdigit()))
    if remedy is None:
        return None
    return f"{key}: found {found}, expected nothing: this key has gone, see CHANGELOG.md. {remedy or 'Remove it.'}"


def without_removed(value: Any, key: str = "") -> Any:
    """Return the values of an old run's spec without removed keys. key: the dotted key of `value`."""
    if isinstance(value, list):
        return [without_removed(entry, key) for entry in value]
    if not isinstance(value, dict):
        return value
    inner = {name: (f"{key}.{name}".lstrip("."), part) for name, part in value.items()}
    return {name: without_removed(part, below) for name, (below, part) in inner.items() if below not in REMOVED}
