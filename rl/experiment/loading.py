"""Makes an :class:`Experiment` of a YAML file, its `defaults:` and `key.sub=value` overrides.

OmegaConf reads YAML with a subclass of yaml's SafeLoader that also refuses duplicate keys and reads `1e-4` as a number.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from numerics.errors import UserError, user_error
from numerics.io.reading import at_home, check_path, read_text
from rl.experiment.experiment import Experiment
from rl.experiment.layers import Say, merged
from rl.experiment.validation import check_plain, named_architecture, parse_experiment
from rollout.named_functions import check_importable

_DEEPEST = 50
"""No spec nests its lists and mappings so far."""
LARGEST_SPEC = 16 << 20
"""Bytes."""
_UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, RecursionError, AssertionError, ValueError)
"""What reading YAML ends in. OmegaConf asserts a mapping; numbers of thousands of digits and half characters are
ValueErrors."""


def note(text: str) -> None:
    """Print a note to the standard error."""
    print(f"note: {text}", file=sys.stderr)


def load_experiment(path: str | Path, overrides: Sequence[str] = (), say: Say = note) -> Experiment:
    """Read, inherit, override and validate the spec at `path`.

    Later layers win: each file of `defaults:` in order, the file itself, then `overrides` such as `"run.steps=2"`.
    Mappings are merged and lists are replaced. Where a layer names another `algorithm`, the settings of the one before
    stay that it has too; `say` is told of those that go, and of all else that a layer leaves out without naming it.
    A relative path is relative to the directory of the file that it is written in; in an override, and where `run.dir`
    is left out, to the current directory. All come out absolute.

    Raises:
        UserError: the file cannot be read, or a key or value is wrong.
    """
    check_path(path, "spec")
    path = Path(at_home(str(path)))
    return _overridden(_read_layers(path, (), say), overrides, path, say)


def compose_experiment(
    values: dict[str, Any], overrides: Sequence[str], source: str | Path, say: Say = note
) -> Experiment:
    """Like `load_experiment`, of `values` in place of a file; messages speak of `source`."""
    return _overridden(values, overrides, Path(source), say)


def _overridden(values: dict[str, Any], overrides: Sequence[str], path: Path, say: Say) -> Experiment:
    values = merged({"run": {"dir": str(Path.cwd() / "runs")}}, values, say)
    for override in overrides:
        values = merged(values, Experiment.located(_parse_override(override), Path.cwd()), say)
    values = _interpolated(values, path)
    if isinstance(name := _algorithm_name(values), str):
        check_importable(name, "algorithm.name")
    if (file := named_architecture(values)) is not None:
        check_importable(f"{file}:ARCHITECTURE", "model.architecture")
    return parse_experiment(values)


def architecture_of(overrides: Sequence[str]) -> str | None:
    """The file that overrides name as `model.architecture`: some models are read before there is a spec of them."""
    values: dict[str, Any] = {}
    for override in overrides:
        if override.startswith("model.architecture="):
            values = Experiment.located(_parse_override(override), Path.cwd())
    return named_architecture(values)


def read_resolved(path: str | Path) -> Experiment:
    """Read the `spec.yaml` of a run directory: paths stay as they are, no defaults and no overrides.

    Raises:
        UserError: the file cannot be read, or a key or value is wrong.
    """
    return parse_experiment(_interpolated(_read_yaml(Path(path)), Path(path)))


def _read_layers(path: Path, ancestors: tuple[Path, ...], say: Say) -> dict[str, Any]:
    """The file merged over the files that its `defaults:` names, relative to it."""
    layer = _read_yaml(path)
    resolved = path.resolve()
    if resolved in ancestors:
        chain = " -> ".join(str(entry) for entry in (*ancestors, resolved))
        raise user_error("defaults", found=str(path), expected="no cycle", remedy=f"Break the cycle {chain}.")
    own = Experiment.located(layer, path.absolute().parent)
    names = own.pop("defaults", [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise user_error(
            f"defaults of {path}",
            found=names,
            expected="a file name or a list of file names",
            remedy="Write defaults: base.yaml, relative to this file.",
        )
    values: dict[str, Any] = {}
    for name in names:
        check_path(name, f"defaults of {path}")
        inherited = path.parent / at_home(name)
        if not inherited.is_file():
            raise user_error(
                f"defaults of {path}",
                found=name,
                expected="an existing YAML file, relative to this one",
                remedy=f"Correct the name; it was looked for in {resolved.parent}.",
            )
        values = merged(values, _read_layers(inherited, (*ancestors, resolved), say), say)
    return merged(values, own, say)


def _read_yaml(path: Path) -> dict[str, Any]:
    text = read_text(path, "spec", "an existing YAML file", "Give the path of a spec file.", LARGEST_SPEC)
    try:
        _check_depth(text)
        values = OmegaConf.to_container(OmegaConf.create(text))
    except _UNREADABLE as error:
        raise user_error(
            f"spec {path}",
            found=_yaml_problem(error),
            expected="valid YAML of plain values",
            remedy="Correct the file.",
        ) from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise user_error(
            f"spec {path}",
            found=type(values).__name__,
            expected="a mapping of section names",
            remedy="Start from examples/arithmetic.yaml.",
        )
    return values


def _check_depth(text: str) -> None:
    """libyaml builds nested nodes by recursion in C, whose stack ends with the process. Raises RecursionError."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise RecursionError(f"lists and mappings in one another, more than {_DEEPEST} deep")


def _yaml_problem(error: Exception) -> str:
    if isinstance(error, AssertionError):
        return "a number, a date or the like"
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return " ".join(str(error).split())
    return f"{error.problem or error.context} in line {mark.line + 1}, column {mark.column + 1}"


def _parse_override(override: str) -> dict[str, Any]:
    key, separator, _ = override.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", key):
        raise user_error(
            "override",
            found=override,
            expected="key.sub=value",
            remedy="Write for example run.steps=2; replace a whole list with gates=[].",
        )
    try:
        _check_depth(override.partition("=")[2])
        return OmegaConf.to_container(OmegaConf.from_dotlist([override]))
    except _UNREADABLE as error:
        raise user_error(
            "override", found=override, expected="a YAML value after =", remedy="Quote the value for YAML."
        ) from error


def _algorithm_name(values: dict[str, Any]) -> Any:
    algorithm = values.get("algorithm")
    return algorithm.get("name") if isinstance(algorithm, dict) else None


def _interpolated(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """The same with `${section.key}` replaced by what stands there; resolvers such as `${oc.env:...}` are refused."""
    check_plain(values)
    resolver = re.search(r"\$\{[^}]*:", str(values))
    if resolver:
        raise user_error(
            f"spec {path}",
            found=resolver.group(),
            expected="interpolation of keys only, such as ${run.name}",
            remedy="Write the value itself.",
        )
    try:
        return OmegaConf.to_container(OmegaConf.create(values), resolve=True, throw_on_missing=True)
    except RecursionError as error:
        raise UserError(f"spec {path}: found an interpolation that leads back to itself. Write the value.") from error
    except OmegaConfBaseException as error:
        raise UserError(f"spec {path}: {' '.join(str(error).split())}. Correct the interpolation.") from error
