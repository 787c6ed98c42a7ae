"""The parts that commands share: their arguments and the completions of these, their exit codes, where they print.

A module here is light to import, as a key press must not wait for torch; each command imports what it needs when it is
called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.files import is_full
from fp8rl.numerics.core.terminal import say_error
from fp8rl.rl.run.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = Path(__file__).parents[1] / "spec.schema.json"
"""Part of the distribution, and in a checkout a link into docs/."""
CONFIGS = Path(__file__).parents[1] / "diagnose/plan/configs"


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn an error that the user can mend into one message and exit code 2; Ctrl-C is 130; anything else keeps its
    traceback."""
    try:
        yield
    except (UserError, OSError) as error:
        if not (isinstance(error, UserError) or is_full(error)):
            raise
        say_error(f"error: {error}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        say_error("interrupted; every process that was started is stopped")
        raise typer.Exit(INTERRUPTED) from None


def progress() -> Callable[[RenderableType], None]:
    """Prints a line to the standard error, which leaves the standard output to the result."""
    from fp8rl.rl.record.console import PlainConsole

    return PlainConsole(stderr=True).print


def show(*found: RenderableType, soft_wrap: bool = False) -> None:
    """Print a result to the standard output."""
    from fp8rl.rl.record.console import PlainConsole

    PlainConsole().print(*found, soft_wrap=soft_wrap)


def end(ok: bool) -> None:
    """Exit code 1 unless it is `ok`."""
    if not ok:
        raise typer.Exit(1)


def refuse_given(context: typer.Context, names: Sequence[str], beside: str) -> None:
    """Refuse options of the command line that would change nothing beside what else was given.

    names: of the command's parameters. beside: what else, in words.

    Raises:
        UserError: naming those that were given.
    """
    options = {each.name: each.opts[0] for each in context.command.params}
    given = [name for name in names if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if given:
        raise user_error(
            ", ".join(options[name] for name in given),
            found=" ".join(str(context.params[name]) for name in given),
            expected=f"none beside {beside}",
            remedy="Leave it out.",
        )


# Completions for the shell: keys of a spec and their values, names of runs, and models that can be planned.


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


# The arguments that several commands have.

SpecPath = Annotated[Path, typer.Argument(metavar="SPEC", help="YAML experiment spec.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Values that replace the spec's, e.g. run.steps=2.",
        autocompletion=complete_keys,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the run's last checkpoint.")]
AcceptChangedData = Annotated[
    bool,
    typer.Option("--accept-changed-data", help="Resume even if data, functions or models have changed."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run of this name first.")]
ArchitectureFile = Annotated[
    Path | None, typer.Option("--architecture", help="File with the architecture of a MODEL that fp8rl does not have.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
