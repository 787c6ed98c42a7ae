"""Does as a refusal says: each way out that a remedy names, as overrides of the spec that was refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from fp8rl.models.plain_yaml import parse_override
from fp8rl.rl.experiment import Experiment, parse_experiment
from fp8rl.rl.experiment.layers import merged
from tests.support.experiments import VALUES

_ASSIGNMENT = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)*=(?:[\w./]*\w)\+*")


def mended(remedy: str, overrides: Sequence[str]) -> Iterator[list[str]]:
    """The overrides after each way out: `Set a.b=c`, several that are joined by `and`, or `Remove a.b`."""
    for way in re.split(r"[,;]? or ", remedy):
        if assignments := _ASSIGNMENT.findall(way):
            yield [*overrides, *assignments]
        elif "emove" in remedy:
            kept = [each for each in overrides if not re.search(rf"(?<![\w.]){re.escape(_key(each))}\b", way)]
            if len(kept) < len(overrides):
                yield kept


def overridden(overrides: Sequence[str]) -> Experiment:
    """The defaults with these overrides of the command line."""
    return parse_experiment(_values(overrides))


def unchecked(overrides: Sequence[str]) -> Experiment:
    """The same, whose sections are validated and not held against each other."""
    spec = Experiment.model_validate(_values(overrides))
    return spec.model_copy(update={"algorithm": spec.algorithm.resolved(spec.rollout)})


def _values(overrides: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {**VALUES, "algorithm": {"name": "grpo"}}
    for override in overrides:
        values = merged(values, parse_override(override), lambda text: None)
    return values


def _key(override: str) -> str:
    return override.partition("=")[0]
