"""Which way a file is read, by what it is: rows of our schema, a run of ours, slime's dump, or verl's batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8rl.diagnose.certify.dump import own_run, slime, verl
from fp8rl.diagnose.certify.dump.source import Dump, whole
from fp8rl.numerics.errors import UserError, user_error
from fp8rl.numerics.io.reading import check_file, check_path, read_bytes


def read_dump(path: Path, model: Path | None = None) -> Dump:
    """The rows of a file, or of a run's folder, whose weights `model` has where it is given.

    Raises:
        UserError: it is none of the kinds, is damaged, or has a row that does not fit; the message names the row.
    """
    check_path(path, "DUMP")
    if not path.exists():
        raise user_error("DUMP", found=str(path), expected="a file, or the folder of a run", remedy="Correct the path.")
    if path.is_dir() or own_run.is_rollouts(path):
        return own_run.read(path, model)
    check_file(path, "DUMP", "a dump")
    match path.suffix:
        case ".pt" | ".pth":
            return slime.read(path)
        case ".safetensors" | ".npz":
            return verl.read(path)
        case ".parquet":
            return whole(path, "rows in parquet", _parquet(path))
        case ".pkl" | ".pickle" | ".dp":
            raise _pickle(path)
    data = read_bytes(path, "DUMP", "a dump")
    if data[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise _pickle(path)
    return whole(path, "rows in JSON", _json_lines(path, data))


def _json_lines(path: Path, data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            found = f"{line[:60].decode('utf-8', 'replace')} ({error})"
            raise _no_object(path, number, found) from None
        if not isinstance(values, dict):
            raise _no_object(path, number, f"a {type(values).__name__}")
        if {"input", "output"} <= values.keys() and "tokens" not in values:
            raise _texts_alone(f"line {number} of {path}", values)
        yield f"line {number}", values


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise user_error(
            "DUMP", found=f"{path}: {error}", expected="a parquet file", remedy="Write it again."
        ) from None
    for number, values in enumerate(table.to_pylist(), start=1):
        yield f"row {number}", values


def _no_object(path: Path, number: int, found: str) -> UserError:
    expected = "a JSON object with tokens, prompt_length and logprobs"
    remedy = "Write one object a line; docs/certify.md has the schema."
    return user_error(f"line {number} of {path}", found=found, expected=expected, remedy=remedy)


def _texts_alone(where: str, values: Mapping[str, Any]) -> UserError:
    """verl's `trainer.rollout_data_dir`."""
    return user_error(
        where,
        found=f"texts without token ids ({', '.join(list(values)[:6])}), as verl writes to trainer.rollout_data_dir",
        expected="token ids and log-probabilities",
        remedy="Have the trainer save its batch as safetensors; docs/certify.md has the line.",
    )


def _pickle(path: Path) -> UserError:
    """`DataProto.save_to_disk` of verl, for one."""
    return user_error(
        "DUMP",
        found=f"{path}, a pickle, which may run any code when it is opened",
        expected="JSON lines, safetensors, npz, parquet, or what torch.save wrote of plain values",
        remedy="Have the trainer save its batch as safetensors; docs/certify.md has the line.",
    )
