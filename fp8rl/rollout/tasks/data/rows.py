"""Reads rows of data by number, from a file of JSON lines or from tables that `datasets` maps into memory.

A row becomes a Python object only when it is read, so data may be larger than memory.
"""

from __future__ import annotations

import glob
import json
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8rl.models.cards import read_configurations
from fp8rl.numerics.core.errors import UserError, listed, user_error
from fp8rl.numerics.core.reading import check_path, check_regular, open_regular, parse_json, reason
from fp8rl.numerics.core.section import RELATIVE

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

Row = dict[str, Any]

READ_WHOLE = 256 * 2**20
"""A file of JSON lines with at most this many bytes is read at once. Later changes of such a file have no effect."""
LONGEST_ROW = 8 * 2**20
"""Largest number of bytes of a row. No context has room for a larger problem, and reading it takes time."""
_BATCH = 1024
"""Number of rows that an iteration reads at a time."""
_OF_TABLES = (".parquet", ".jsonl", ".csv", ".tsv", ".arrow")
_OF_DIRECTORIES = (".csv", ".tsv", ".arrow", ".json", ".gz", ".bz2", ".xz", ".zst", ".zip")
"""Endings of files that `datasets` can read in a directory. Such a file need not be JSON lines."""
_EXPECTED = "an existing JSONL file, parquet file or directory of a data set"


class JsonLines(Sequence[Row]):
    """The objects of a file of JSON lines. A line is parsed at each access. A bad line raises `UserError`."""

    columns: tuple[str, ...] | None = None
    """The names of all columns. None: each line has its own columns."""
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
        line, number = self._data[self._starts[index] : self._starts[index + 1]], index + 1
        where = f"{self._key}: line {number} of {self._path}"
        remedy = f"Correct or remove line {number}."
        if number == 1 and self._path.suffix in _OF_DIRECTORIES:
            remedy = (
                f"Put {self._path.name} into a separate directory, and set the path to the directory, because a path "
                "to a file means JSON lines or parquet."
            )
        _check_size(len(line), where, remedy)
        try:
            record = parse_json(line, _finite_or_none)
        except UnicodeDecodeError as error:
            raise user_error(where, found=line, expected="UTF-8 text", remedy=remedy) from error
        except ValueError as error:
            found = line.decode("utf-8").rstrip("\n")
            raise user_error(where, found=found, expected=f"valid JSON ({error})", remedy=remedy) from error
        if not isinstance(record, dict):
            raise user_error(where, found=record, expected="a JSON object", remedy=remedy)
        return record


class TableRows(Sequence[Row]):
    """The rows of a data set, in the form that they would have in JSON lines. Nothing is decoded. Bytes are left out.

    Arrow gives all structs of a column the same keys, with null for a key that a row lacks. A null in the data looks
    the same. So nested values lose every null. A column that is null in a row stays, as `None`.
    """

    unit = "row"

    def __init__(self, dataset: Dataset, path: Path, key: str) -> None:
        self._tables, self._path, self._key = dataset.with_format("arrow"), path, key
        self._features = dataset.features
        self.columns: tuple[str, ...] | None = tuple(dataset.column_names)

    def __len__(self) -> int:
        return len(self._tables)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        where, remedy = f"{self._key}: row {index + 1} of {self._path}", "Copy the file again, or remove the row."
        try:
            table = self._tables[index]
            _check_size(table.nbytes, where, remedy)
            return _row(table.to_pylist()[0], self._features)
        except UserError:
            raise
        except Exception as error:  # whatever flipped bytes come to: text that is no UTF-8, dates that are none
            found = f"{type(error).__name__}: {error}"
            raise user_error(where, found=found, expected="values that can be read", remedy=remedy) from error

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), _BATCH):
            try:
                table = self._tables[start : start + _BATCH]
                rows = None if table.nbytes > LONGEST_ROW else [_row(row, self._features) for row in table.to_pylist()]
            except Exception:  # as above; which row it is, the row itself says
                rows = None
            yield from rows or (self[index] for index in range(start, min(start + _BATCH, len(self))))


Rows = JsonLines | TableRows


def open_rows(path: Path, split: str | None, key: str, name: str | None = None, texts: Sequence[str] = ()) -> Rows:
    """Open the rows at `path`: a `.parquet` file, a data set's directory, or else a file of JSON lines.

    A directory was saved by `datasets`, or has files that `datasets.load_dataset` knows: parquet, JSON, CSV. If
    `datasets` has not saved the directory itself, it first writes tables into its cache, and maps them from there.
    name: the name of the configuration in the directory's README.md. texts: columns of a CSV file that stay text. In
    all other columns, numbers are read as numbers. Raises UserError, which names `key`: the path does not exist, cannot
    be read, or has no such configuration or split.
    """
    check_path(path, key)
    if (path.is_dir() or (path.suffix == ".parquet" and path.is_file())) and "::" in str(path.resolve()):
        expected = "a path without '::', which datasets takes for a chain of addresses"
        raise user_error(key, str(path), expected, "Rename it, or move it.")
    if path.is_dir():
        return TableRows(_split(_folder(path, name, split, key, texts), split, path, key), path, key)
    for what, value in (("name", name), ("split", split)):
        if value is not None:
            raise user_error(f"{key}.{what}", value, f"none, as {path} is one file", f"Remove {key}.{what}.")
    if path.suffix == ".parquet" and path.is_file():
        try:
            found = _quiet_datasets().Dataset.from_parquet(glob.escape(str(path)))
        except Exception as error:  # whatever a reader of damaged files raises
            raise _unreadable(path, key, error, "a whole parquet file of one row or more") from error
        return TableRows(found, path, key)
    return JsonLines(path, key)


def _folder(path: Path, name: str | None, split: str | None, key: str, texts: Sequence[str]) -> Dataset | DatasetDict:
    check_regular(path, key)
    datasets, names = _quiet_datasets(), [*read_configurations(path, key)]
    saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    if saved and name is not None:
        expected = f"none, as {path} was saved as one data set"
        raise user_error(f"{key}.name", found=name, expected=expected, remedy=f"Remove {key}.name.")
    try:
        if saved:
            return datasets.load_from_disk(str(path))
        with _as_it_is_named(datasets.data_files):
            builder = datasets.load_dataset_builder(str(path), name)
            settings = {"converters": dict.fromkeys(texts, str)} if builder.name == "csv" else {}
            found = datasets.load_dataset(str(path), name, **settings)
    except Exception as error:  # as above
        missing = "Config name is missing" in str(error)  # of several `datasets` takes none by itself
        if missing or (name is not None and name not in names):
            expected = f"one of {listed(names or ['default'])}, the configurations of {path}"
            remedy = f"Set it: {{path: {path}, name: {listed(names[:1])}}}." if missing else "Correct or remove it."
            raise user_error(f"{key}.name", found=name, expected=expected, remedy=remedy) from error
        expected = "a directory that datasets has saved, or one of parquet, JSON or CSV files"
        raise _unreadable(path, key, error, expected) from error
    if builder.name == "json":
        _check_no_dates(found, path, key)
    if split is None and not names:
        _check_all_read(path, builder.config.data_files, key)
    return found


@contextmanager
def _as_it_is_named(data_files: Any) -> Iterator[None]:
    """Let `datasets` read a directory whose name looks like a pattern, such as `gsm8k[1]`. Otherwise it would search
    the directories that match the pattern (its issue 7468)."""
    resolve = data_files.resolve_pattern

    def escaped(pattern: str, base_path: str, *rest: Any, **settings: Any) -> Any:
        return resolve(pattern, glob.escape(base_path), *rest, **settings)

    data_files.resolve_pattern = escaped
    try:
        yield
    finally:
        data_files.resolve_pattern = resolve


def _check_all_read(path: Path, read: Mapping[str, Sequence[str]], key: str) -> None:
    """Refuse a directory with tables that `datasets` passes over, as they are of another kind or of no split."""
    names = {str(Path(name).relative_to(path.resolve())) for files in read.values() for name in files}
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        hidden = name.startswith((".", "_")) or "/." in name
        if name not in names and not hidden and file.suffix in _OF_TABLES and file.is_file():
            found = f"{path} with {name}, which datasets leaves out beside {min(names)}"
            remedy = f"Give each its own source, or set {key}.split to read the others alone."
            raise user_error(key, found, "tables of one kind, all of a split or none", remedy)


def _check_no_dates(found: DatasetDict, path: Path, key: str) -> None:
    """Refuse columns whose texts in JSON are dates. Arrow would read them as dates, and give a problem another text."""

    def dated(feature: Any, name: str) -> Iterator[str]:
        if isinstance(feature, Mapping):
            for inner, part in feature.items():
                yield from dated(part, f"{name}.{inner}" if name else inner)
        elif hasattr(feature, "feature"):
            yield from dated(feature.feature, name)
        elif str(getattr(feature, "dtype", "")).startswith("timestamp"):
            yield name

    for split in found.values():
        if columns := [*dated(split.features, "")]:
            dates = f"{path} with dates in {', '.join(columns)}, which are read from its JSON files in another form"
            remedy = "Name the file itself if it is JSON lines, or save the data as parquet."
            raise user_error(key, dates, "columns of texts that are no dates", remedy)


def _quiet_datasets() -> Any:
    """Import `datasets`. Call this only when a source needs it, because the import takes a second."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def _split(found: Dataset | DatasetDict, split: str | None, path: Path, key: str) -> Dataset:
    if not isinstance(found, dict):
        if split is not None:
            expected = f"none, as {path} was saved as a single split"
            raise user_error(f"{key}.split", split, expected, f"Remove {key}.split.")
        return found
    if split is None and len(found) == 1:
        (only,) = found.values()
        return only
    if split not in found:
        remedy = f"Set it: {{path: {path}, split: {listed([*found][:1])}}}."
        raise user_error(f"{key}.split", split, f"one of {listed(found)}, the splits of {path}", remedy)
    return found[split]


def _unreadable(path: Path, key: str, error: Exception, expected: str = _EXPECTED) -> Exception:
    root = error
    while isinstance(root.__cause__, Exception):  # a data set's builder wraps what its reader says
        root = root.__cause__
    remedy = f"Correct the path; {RELATIVE}." if isinstance(root, OSError) else "Copy it again, or correct the path."
    return user_error(key, found=f"{path}: {' '.join(reason(root).split())}", expected=expected, remedy=remedy)


def _check_size(size: int, where: str, remedy: str) -> None:
    if size > LONGEST_ROW:
        raise UserError(f"{where}: found {size} bytes, expected at most {LONGEST_ROW}. {remedy}")


def _line_starts(data: bytes | mmap.mmap) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the offsets of all lines, and the end of the last line: int64 [lines + 1]."""
    step, starts = 64 * 2**20, [np.zeros(1, np.int64)]
    for offset in range(0, len(data), step):
        piece = np.frombuffer(data[offset : offset + step], np.uint8)
        starts.append(np.flatnonzero(piece == ord("\n")) + offset + 1)
    found = np.concatenate(starts)
    return found if found[-1] == len(data) else np.append(found, len(data))


def _finite_or_none(number: str | float) -> float | None:
    """Return a number, and None for NaN and infinity, which JSON lacks. Tables have NaN where a number is missing."""
    return value if math.isfinite(value := float(number)) else None


def _row(columns: Row, features: Mapping[str, Any]) -> Row:
    return {name: _plain(value, features[name]) for name, value in columns.items() if not isinstance(value, bytes)}


def _plain(value: Any, feature: Any) -> Any:
    """Return a value in the form that it has in JSON. Dates become text. Bytes, and nulls in structs, are left out.

    feature: the value's type in `datasets`. A value of the type `Json` is text in Arrow, and is parsed here.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return _finite_or_none(value)
    if isinstance(value, str):
        return json.loads(value) if type(feature).__name__ == "Json" else value
    if isinstance(value, dict):
        inner = feature if isinstance(feature, dict) else {}
        kept = {name: part for name, part in value.items() if part is not None and not isinstance(part, bytes)}
        return {name: _plain(part, inner.get(name)) for name, part in kept.items()}
    if isinstance(value, list | tuple):
        element = getattr(feature, "feature", None)
        return [_plain(part, element) for part in value if not isinstance(part, bytes)]
    return str(value)
