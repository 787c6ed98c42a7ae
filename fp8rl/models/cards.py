"""Reads a data set's configurations from its card, a README.md that begins with YAML. Anybody may upload a card."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fp8rl.models.plain_yaml import check_yaml
from fp8rl.numerics.core.errors import listed, user_error
from fp8rl.numerics.core.reading import read_text

_FRONT = re.compile(r"\s*---[\r\n]+(.*?)[\r\n]+---(?:[\r\n]|$)", re.DOTALL)
_LARGEST = 4 << 20
"""The most bytes of a card."""


def _within(pattern: str) -> str:
    if "://" in pattern or pattern.startswith(("/", "~")) or ".." in pattern.split("/"):
        raise ValueError("a path within the data set")
    return pattern


_Pattern = Annotated[str, AfterValidator(_within)]
_Patterns = _Pattern | list[_Pattern]


class _Split(BaseModel):
    split: str
    path: _Patterns


class Configuration(BaseModel):
    """A part of a data set, and the patterns of its files."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    config_name: str
    data_dir: _Pattern | None = None
    data_files: _Pattern | list[_Pattern | _Split] | dict[str, _Patterns] | None = None
    default: bool = False

    @property
    def patterns(self) -> list[str]:
        """Patterns of files below the data set's folder; []: all files."""
        below, files = f"{self.data_dir}/" if self.data_dir else "", self.data_files
        if files is None:
            return [f"{below}*"] if below else []
        return [below + text for text in _texts(list(files.values()) if isinstance(files, dict) else files)]


class _Card(BaseModel):
    configs: Annotated[list[Configuration], Field(max_length=1000)] | None = None


def read_configurations(folder: Path, key: str) -> dict[str, Configuration]:
    """Read the configurations of a data set's folder, by name; {} if there is no card, or the card names none. Raises
    UserError, which calls the data set `key`, if the card cannot be read."""
    found: dict[str, Configuration] = {}
    for path, front in ((folder / "README.md", _FRONT), (folder / ".huggingface.yaml", re.compile("(.*)", re.DOTALL))):
        matched = front.match(read_text(path, key, "a card", largest=_LARGEST)) if path.is_file() else None
        try:
            if matched is not None:
                check_yaml(matched[1], ours=False)
                card = _Card.model_validate(yaml.load(matched[1], yaml.CSafeLoader) or {})
                found |= {config.config_name: config for config in card.configs or ()}
        except (ValueError, TypeError, OverflowError, RecursionError, yaml.YAMLError) as error:
            why = " ".join(str(error).split())
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                why = f"{listed(first['loc'], '.')}: {first['msg']}"
            remedy = "Correct the card, or give the path of a file of the data set on this machine."
            raise user_error(f"{key}: {path}", found=why, expected="a valid card", remedy=remedy) from error
    return found


def _texts(value: str | _Split | list[str] | list[str | _Split] | list[_Patterns]) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for part in [value.path] if isinstance(value, _Split) else value if isinstance(value, list) else ():
        yield from _texts(part)
