"""Has the base class of all sections of an experiment spec, and the types of values that name files."""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.reading import at_home, check_path

T = TypeVar("T")
RELATIVE = "a relative path starts at the folder of its spec file, or on the command line at the current directory"
"""The hint in messages on a path that leads nowhere."""


def validated(validate: Callable[[Any], T], values: Any, where: str, remedy: str) -> T:
    """Validate the values of a file by pydantic's `validate`. Raises UserError, which names the first wrong key."""
    try:
        return validate(values)
    except ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(str(part) for part in wrong["loc"])
        expected = wrong["msg"].removeprefix("Input should be ")
        raise user_error(f"{where}: {key}", found=wrong["input"], expected=expected, remedy=remedy) from None


class Section(BaseModel):
    """One section of a spec. Unknown keys are refused, no value is coerced (`"3"` is no integer), and no value changes
    after loading.

    The text below a field describes it: the reference page and the schema for editors show it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    shorthand: ClassVar[str] = ""
    """The key whose value may be written in place of the whole section; empty: the section must be a mapping."""

    @model_validator(mode="before")
    @classmethod
    def _value_alone(cls, values: Any) -> Any:
        alone = cls.shorthand and isinstance(values, str | list | tuple)
        return {cls.shorthand: values} if alone else values

    @classmethod
    def located(cls, values: Any, directory: Path) -> Any:
        """Return the values of this section with its relative paths, which start from `directory`, made absolute.

        A value of the wrong type is left to the validation.
        """
        if isinstance(values, Mapping):
            fields = cls.model_fields
            return {key: _at(fields.get(key), value, directory) for key, value in values.items()}
        return _at(cls.model_fields.get(cls.shorthand), values, directory)


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every value that is no mapping; an empty mapping is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def sections_in(annotation: Any) -> list[type[Section]]:
    """Return the sections that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in typing.get_args(annotation) for section in sections_in(part)]


@dataclass(frozen=True)
class Located:
    """Marks the type of a text that names a file."""

    says: str
    """The kind of file, in words."""
    absolute: Callable[[str, Path], str]
    """A function of the text and the directory of its spec that returns the text with an absolute path."""


def _path(text: str, directory: Path) -> str:
    return os.path.normpath(directory / at_home(text)) if text else text


def _function(text: str, directory: Path) -> str:
    path, colon, name = text.rpartition(":")
    return f"{_path(path, directory)}:{name}" if colon and path.endswith(".py") else text


SpecPath = Annotated[
    str, Field(min_length=1), AfterValidator(lambda text: check_path(text, "path") or text), Located("path", _path)
]
"""A path that a file could have. A relative path starts at the folder of the file that it is written in. `~` is the
home directory."""

SpecFunction = Annotated[str, Field(min_length=1), Located("name", _function)]
"""A name of ours, `package.module:name`, or `path/to/file.py:name`, whose path is a `SpecPath`."""


def _at(field: Any, value: Any, directory: Path) -> Any:
    """Return the value of a field with its paths made absolute."""
    return value if field is None else located_as(Annotated[field.annotation, None, *field.metadata], value, directory)


def located_as(kind: Any, value: Any, directory: Path) -> Any:
    """Return a value of a type with its paths made absolute."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        marks = [mark for mark in parts[1:] if isinstance(mark, Located)]
        if marks and isinstance(value, str):
            return marks[0].absolute(value, directory)
        return located_as(parts[0], value, directory)
    if origin is tuple and isinstance(value, list):
        return [located_as(parts[0], item, directory) for item in value]
    if origin in (tuple, typing.Union, types.UnionType):
        for part in parts:
            value = located_as(part, value, directory)
    elif isinstance(kind, type) and issubclass(kind, Section):
        return kind.located(value, directory)
    return value
