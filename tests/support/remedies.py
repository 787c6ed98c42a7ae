"""Does as a refusal says: each way out that a remedy names, as overrides of the spec that was refused. Finds the rules
that have refused."""

import ast
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from fp8rl.models.plain_yaml import parse_override
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import Experiment, parse_experiment
from fp8rl.rl.experiment.loading import merged
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
    values: dict[str, Any] = {**VALUES, "algorithm": {"name": "grpo"}}
    for override in overrides:
        values = merged(values, parse_override(override), lambda text: None)
    return parse_experiment(values)


def _key(override: str) -> str:
    return override.partition("=")[0]


def rules_of(*modules: ModuleType) -> set[str]:
    """The rules of modules, each a `yield` of a refusal, as `file:line`."""
    return {f"{file}:{line}" for file, lines in _yields(modules).items() for line in lines}


def broken(call: Callable[[], object], *modules: ModuleType) -> set[str]:
    """The rules of modules that refuse while something is called that raises a refusal."""
    yields, seen = _yields(modules), set()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        file = frame.f_code.co_filename
        seen.update(f"{file}:{line}" for line, end in yields.get(file, {}).items() if line <= frame.f_lineno <= end)
        return trace if file in yields else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except UserError:
        pass
    finally:
        sys.settrace(before)
    return seen


def _yields(modules: Sequence[ModuleType]) -> dict[str, dict[int, int]]:
    files = [str(module.__file__) for module in modules]
    return {
        file: {
            node.lineno: node.end_lineno or node.lineno
            for node in ast.walk(ast.parse(Path(file).read_text()))
            if isinstance(node, ast.Yield) and isinstance(node.value, ast.Call)
        }
        for file in files
    }
