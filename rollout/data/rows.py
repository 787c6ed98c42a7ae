"""Rows of data by number, read from where they lie: a file of JSON lines, or tables that `datasets` maps into memory.

Neither holds a row as a Python object before it is asked for, so that data may be larger than memory.
"""

from __future__ import annotations

import glob
import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from numerics.errors import user_error
from numerics.io.reading import check_path, check_regular, open_regular, reason
from numerics.io.section import RELATIVE

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

Row = dict[str, Any]

READ_WHOLE = 256 * 2**20
"""Bytes up to which a file of lines is read at once, and what becomes of it afterwards does not matter."""
_BATCH = 1024
"""Rows that are read at a time where all are."""
_EXPECTED = "an existing JSONL file, parquet file or directory of a data set"


class JsonLines(Sequence[Row]):
    """The objects of a file of JSON lines. A line is read when it is asked for; one that is none raises `UserError`.

    columns: not known, as each line has its own.
    """

    columns: tuple[str, ...] | None = None
    unit = "line"

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        try:
            with open_regular(path) as file:
                size = path.stat().st_size
                self._data = file.readall() if size <= READ_WHOLE else mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
            raise _unreadable(path, key, error) from error
        self._starts = _line_starts(self._data)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._parse(self._data[self._starts[index] : self._starts[index + 1]], index + 1)

    def _parse(self, line: bytes, number: int) -> Row:
        where = f"{self._key}: line {number} of {self._path}"
        remedy = f"Correct or remove line {number}."
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise user_error(where, found=line, expected="UTF-8 text", remedy=remedy) from error
        except (
            ValueError,
            RecursionError,
        ) as error:  # besides bad syntax: numbers of thousands of digits, deep nesting
            found = line.decode("utf-8").rstrip("\n")
            raise user_error(where, found=found, expected=f"valid JSON ({error})", remedy=remedy) from error
        if not isinstance(record, dict):
            raise user_error(where, found=record, expected="a JSON object", remedy=remedy)
        return record


class TableRows(Sequence[Row]):
    """The rows of a data set, as plain values: nothing in them is decoded, and bytes are left out."""

    unit = "row"

    def __init__(self, dataset: Dataset, path: Path, key: str) -> None:
        self._tables, self._path, self._key = dataset.with_format("arrow"), path, key
        self.columns: tuple[str, ...] | None = tuple(dataset.column_names)

    def __len__(self) -> int:
        return len(self._tables)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        try:
            return _plain(self._tables[index].to_pylist()[0])
        except Exception as error:  # whatever flipped bytes come to: text that is no UTF-8, dates that are none
            raise user_error(
                f"{self._key}: row {index + 1} of {self._path}",
                found=f"{type(error).__name__}: {error}",
                expected="values that can be read",
                remedy="Copy the file again, or remove the row.",
            ) from error

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), _BATCH):
            try:
                rows = [_plain(row) for row in self._tables[start : start + _BATCH].to_pylist()]
            except Exception:  # as above; which row it is, the row itself says
                rows = [self[index] for index in range(start, min(start + _BATCH, len(self)))]
            yield from rows


Rows = JsonLines | TableRows


def open_rows(path: Path, split: str | None, key: str) -> Rows:
    """The rows at `path`: of a `.parquet` file, of a data set's directory, else of a file of JSON lines.

    A directory is one that `datasets` has saved, or has files that `datasets.load_dataset` knows: parquet, JSON, CSV.
    Tables other than saved ones are written once into its cache, as they are mapped from there.

    Raises:
        UserError: there is nothing, it cannot be read, or it has no such split. The message names `key`.
    """
    check_path(path, key)
    if path.is_dir():
        return TableRows(_split(_directory(path, key), split, path, key), path, key)
    if split is not None:
        raise user_error(
            f"{key}.split", found=split, expected=f"none, as {path} is one file", remedy=f"Remove {key}.split."
        )
    if path.suffix == ".parquet" and path.is_file():
        return TableRows(_parquet(path, key), path, key)
    return JsonLines(path, key)


def _parquet(path: Path, key: str) -> Dataset:
    datasets = _quiet_datasets()
    try:
        found = datasets.load_dataset("parquet", data_files={"train": glob.escape(str(path))})
    except Exception as error:  # whatever a reader of damaged files raises
        raise _unreadable(path, key, error, "a whole parquet file") from error
    return found["train"]


def _directory(path: Path, key: str) -> Dataset | DatasetDict:
    check_regular(path, key)
    datasets = _quiet_datasets()
    saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    try:
        return datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except Exception as error:  # as above
        if "Config name is missing" in str(error):
            raise _several(datasets.get_dataset_config_names(str(path)), path, key) from error
        expected = "a directory that datasets has saved, or one of parquet, JSON or CSV files"
        raise _unreadable(path, key, error, expected) from error


def _quiet_datasets() -> Any:
    """The library, which takes a second to import: not before a source needs it."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def _split(found: Dataset | DatasetDict, split: str | None, path: Path, key: str) -> Dataset:
    if not isinstance(found, dict):
        if split is not None:
            raise user_error(
                f"{key}.split",
                found=split,
                expected=f"none, as {path} was saved as a single split",
                remedy=f"Remove {key}.split.",
            )
        return found
    if split is None and len(found) == 1:
        (only,) = found.values()
        return only
    if split not in found:
        raise user_error(
            f"{key}.split",
            found=split,
            expected=f"one of {', '.join(found)}, the splits of {path}",
            remedy=f"Set it: {{path: {path}, split: {next(iter(found))}}}.",
        )
    return found[split]


def _several(names: list[str], path: Path, key: str) -> Exception:
    """The error for a directory with several configurations, of which `datasets` takes none by itself."""
    folder = next((path / name for name in names if (path / name).is_dir()), None)
    return user_error(
        key,
        found=str(path),
        expected=f"one data set, and this directory has the configurations {', '.join(names)}",
        remedy=f"Give the folder of one, such as {folder}." if folder else "Give the files of one.",
    )


def _unreadable(path: Path, key: str, error: Exception, expected: str = _EXPECTED) -> Exception:
    root = error
    while isinstance(root.__cause__, Exception):  # a data set's builder wraps what its reader says
        root = root.__cause__
    remedy = f"Correct the path; {RELATIVE}."
    if not isinstance(root, OSError):
        remedy = "Copy it again, or correct the path."
    return user_error(key, found=f"{path}: {' '.join(reason(root).split())}", expected=expected, remedy=remedy)


def _line_starts(data: bytes | mmap.mmap) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where each line begins, and the end of the last one: int64 [lines + 1]."""
    step, starts = 64 * 2**20, [np.zeros(1, np.int64)]
    for offset in range(0, len(data), step):
        piece = np.frombuffer(data[offset : offset + step], np.uint8)
        starts.append(np.flatnonzero(piece == ord("\n")) + offset + 1)
    found = np.concatenate(starts)
    return found if found[-1] == len(data) else np.append(found, len(data))


def _plain(value: Any) -> Any:
    """The value as JSON has it: a date as text, and without bytes."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items() if not isinstance(part, bytes)}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value if not isinstance(part, bytes)]
    return str(value)
