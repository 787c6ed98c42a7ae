"""From a YAML file, its `defaults:` and `key.sub=value` overrides to an :class:`Experiment`.

OmegaConf reads YAML with a subclass of yaml's SafeLoader that also refuses duplicate keys and reads `1e-4` as a number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from numerics.errors import UserError, user_error
from numerics.io.reading import check_path, read_text
from rl.experiment.experiment import Experiment
from rl.experiment.validation import parse_experiment
from rollout.rewards.builtin import BUILT_IN

_DEEPEST = 50
"""No spec nests its lists and mappings so far."""
PATHS = (("model", "path"), ("data", "train"), ("data", "eval"), ("run", "dir"), ("teacher", "path"))


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read, inherit, override and validate the spec at `path`.

    Later layers win: each file of `defaults:` in order, the file itself, then `overrides` such as `"run.steps=2"`.
    Mappings are merged, lists are replaced, and a layer that names another `algorithm` replaces that whole section.
    A relative path is relative to the directory of the file that it is written in; in an override, and where `run.dir`
    is left out, to the current directory. All come out absolute.

    Raises:
        UserError: the file cannot be read, or a key or value is wrong.
    """
    path = Path(path)
    check_path(path, "spec")
    return _overridden(_read_layers(path, ancestors=()), overrides, path)


def compose_experiment(values: dict[str, Any], overrides: Sequence[str], source: str | Path) -> Experiment:
    """Like `load_experiment`, of `values` in place of a file; messages speak of `source`."""
    return _overridden(OmegaConf.create(values), overrides, Path(source))


def _overridden(config: DictConfig, overrides: Sequence[str], path: Path) -> Experiment:
    for override in overrides:
        config = _merge(config, _resolved(_parse_override(override), Path.cwd()))
    values = _plain(_merge(OmegaConf.create({"run": {"dir": str(Path.cwd() / "runs")}}), config), path)
    return parse_experiment(values)


def read_resolved(path: str | Path) -> Experiment:
    """Read the `spec.yaml` of a run directory: paths stay as they are, no defaults and no overrides.

    Raises:
        UserError: the file cannot be read, or a key or value is wrong.
    """
    return parse_experiment(_plain(_read_yaml(Path(path)), Path(path)))


def _read_layers(path: Path, ancestors: tuple[Path, ...]) -> DictConfig:
    """The file merged over the files that its `defaults:` names, relative to it."""
    layer = _read_yaml(path)
    resolved = path.resolve()
    if resolved in ancestors:
        chain = " -> ".join(str(entry) for entry in (*ancestors, resolved))
        raise user_error("defaults", found=str(path), expected="no cycle", remedy=f"Break the cycle {chain}.")
    own = _resolved(layer, path.absolute().parent)
    names = OmegaConf.to_container(own).pop("defaults", [])
    own.pop("defaults", None)
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise user_error(
            f"defaults of {path}",
            found=names,
            expected="a file name or a list of file names",
            remedy="Write defaults: base.yaml, relative to this file.",
        )
    config = OmegaConf.create({})
    for name in names:
        check_path(name, f"defaults of {path}")
        if not (path.parent / name).is_file():
            raise user_error(
                f"defaults of {path}",
                found=name,
                expected="an existing YAML file, relative to this one",
                remedy=f"Correct the name; it was looked for in {resolved.parent}.",
            )
        config = _merge(config, _read_layers(path.parent / name, (*ancestors, resolved)))
    return _merge(config, own)


def _read_yaml(path: Path) -> DictConfig:
    text = read_text(path, "spec", "an existing YAML file", "Give the path of a spec file.")
    try:
        _check_depth(text)
        config = OmegaConf.create(text)
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError, AssertionError) as error:  # it asserts a mapping
        raise user_error(
            f"spec {path}",
            found=_yaml_problem(error),
            expected="valid YAML of plain values",
            remedy="Correct the file.",
        ) from error
    if not isinstance(config, DictConfig) or not all(isinstance(key, str) for key in config):
        raise user_error(
            f"spec {path}",
            found=type(config).__name__,
            expected="a mapping of section names",
            remedy="Start from examples/arithmetic.yaml.",
        )
    return config


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


def _parse_override(override: str) -> DictConfig:
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
        return OmegaConf.from_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise user_error(
            "override", found=override, expected="a YAML value after =", remedy="Quote the value for YAML."
        ) from error


def _merge(base: DictConfig, layer: DictConfig) -> DictConfig:
    """`layer` over `base`; OmegaConf merges mappings and replaces lists."""
    replaced = _algorithm_name(layer) not in (None, _algorithm_name(base))
    if replaced:
        base = base.copy()
        base.pop("algorithm", None)
    for key in layer:
        # A scalar or list over a mapping (or the reverse) is for the validation to refuse, not for the merge.
        if key in base and OmegaConf.is_dict(base._get_node(key)) != OmegaConf.is_dict(layer._get_node(key)):
            base = base.copy()
            base.pop(key)
    return OmegaConf.merge(base, layer)


def _algorithm_name(config: DictConfig) -> str | None:
    algorithm = OmegaConf.to_container(config).get("algorithm")
    return algorithm.get("name") if isinstance(algorithm, dict) else None


def _plain(config: DictConfig, path: Path) -> dict[str, Any]:
    """Plain dicts and lists with `${section.key}` interpolated; resolvers such as `${oc.env:...}` are refused."""
    resolver = re.search(r"\$\{[^}]*:", str(OmegaConf.to_container(config)))
    if resolver:
        raise user_error(
            f"spec {path}",
            found=resolver.group(),
            expected="interpolation of keys only, such as ${run.name}",
            remedy="Write the value itself.",
        )
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except RecursionError as error:
        raise UserError(f"spec {path}: found an interpolation that leads back to itself. Write the value.") from error
    except OmegaConfBaseException as error:
        raise UserError(f"spec {path}: {' '.join(str(error).split())}. Correct the interpolation.") from error


def _resolved(layer: DictConfig, directory: Path) -> DictConfig:
    """The layer with its relative paths made absolute, from `directory`; the validation refuses what is no path."""
    for section, key in PATHS:
        held = layer._get_node(section)  # an interpolated section is not resolved, as the files below may define it
        if OmegaConf.is_dict(held):
            _resolve(held, key, directory)
    held = layer._get_node("eval")
    sets = _mappings(held._get_node("sets")) if OmegaConf.is_dict(held) else []
    for each in sets:
        _resolve(each, "path", directory)
    for function in [function for holder in (layer, *sets) for function in _reward_functions(holder)]:
        _resolve_file(function, "function", directory)
        name, kwargs = str(function.get("function")), function._get_node("kwargs")
        if name in BUILT_IN and BUILT_IN[name].tokenizer and OmegaConf.is_dict(kwargs):
            _resolve(kwargs, BUILT_IN[name].tokenizer, directory)
    environment = layer._get_node("environment")
    if OmegaConf.is_dict(environment):
        _resolve_file(environment, "function", directory)
    else:
        _resolve_file(layer, "environment", directory)
    return layer


def _resolve_file(held: DictConfig, key: str, directory: Path) -> None:
    """Make the file of a function's name, `path/to/file.py:name`, absolute."""
    path, colon, name = str(held.get(key)).rpartition(":")
    if colon and path.endswith(".py"):
        held[key] = f"{os.path.normpath(directory / path)}:{name}"


def _resolve(held: DictConfig | ListConfig, key: Any, directory: Path) -> None:
    """Make the path at `key` absolute, or each of a list there, or that of a source."""
    node = held._get_node(key)
    if OmegaConf.is_list(node):
        for index in range(len(node)):
            _resolve(node, index, directory)
    elif OmegaConf.is_dict(node):
        _resolve(node, "path", directory)
    elif node is not None and isinstance(value := node._value(), str) and value and not value.startswith("${"):
        held[key] = os.path.normpath(directory / value)


def _reward_functions(layer: DictConfig) -> list[DictConfig]:
    """The entries of `rewards`, or of `rewards.functions`, as far as they are mappings."""
    held = layer._get_node("rewards")
    return _mappings(held._get_node("functions") if OmegaConf.is_dict(held) else held)


def _mappings(held: Any) -> list[DictConfig]:
    """The entries of a list, if it is one, that are mappings."""
    return [item for item in held._iter_ex(resolve=False) if OmegaConf.is_dict(item)] if OmegaConf.is_list(held) else []
