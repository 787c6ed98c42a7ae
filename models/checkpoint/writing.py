"""A Hugging Face directory, written by all ranks of a trainer together, or by one process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.files import publish_directory, room_for
from fp8rl.numerics.core.memory import shards
from fp8rl.numerics.core.process import exhaust, rank, together
from fp8rl.numerics.core.reading import check_path, open_regular, reason

# Safetensors files of others: one that is damaged, or no file at all, is refused in one sentence.


def open_tensors(file: Path, key: str) -> Any:
    """Open a safetensors file, as `safe_open` does; messages speak of it as `key`.

    Raises:
        UserError: it is missing, no regular file, or not whole.
    """
    check_path(file, key)
    try:
        open_regular(file).close()  # at a pipe, that library would wait
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        expected = "a whole safetensors file"
        raise user_error(
            f"{key}: {file}", found=reason(error), expected=expected, remedy="Copy the file again."
        ) from None


INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 4 << 30

Written = dict[str, tuple[str, int]]
"""The file and the bytes of each tensor."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whose bytes are a function of what is given.

    safetensors writes the keys of the metadata in the order of a hash map, which is another one in every process.
    """
    save_file(dict(tensors), path, dict(metadata))
    if len(metadata) < 2:
        return
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(metadata.items()))
        written = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(written) != size:
            raise OSError(
                f"{path}: found a header of {size} bytes, expected {len(written)} of the same keys and values"
            )
        file.seek(8)
        file.write(written)


def write_directory(path: Path, tensors: Iterable[tuple[str, Tensor]], describe: Callable[[Path], object]) -> None:
    """Write the files of a model: what `describe` puts into the directory, and the tensors of all ranks.

    All ranks take part. `path` appears whole or not at all, in place of what stood there.
    tensors: (HF name, tensor) of this rank, no name on two ranks. describe: called on rank 0 alone.

    Raises on all ranks what one of them raises.
    """
    partial = path.with_name(f".{path.name}.partial")
    first = rank() == 0
    try:
        with room_for(path):
            together(lambda: _begin(partial, describe) if first else None)
            written = together(lambda: _write(tensors, partial))
            together(lambda: _finish(partial, path, written) if first else None)
    except BaseException:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        exhaust(tensors)


def _begin(partial: Path, describe: Callable[[Path], object]) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    describe(partial)


def _write(tensors: Iterable[tuple[str, Tensor]], partial: Path) -> Written:
    written: Written = {}
    try:
        for index, shard in enumerate(shards(tensors, _SHARD_BYTES)):
            file = f"{rank():05d}-{index:05d}.safetensors"
            write_tensors(partial / file, {name: tensor.cpu().contiguous() for name, tensor in shard}, {"format": "pt"})
            written |= {name: (file, tensor.nbytes) for name, tensor in shard}
    finally:
        exhaust(tensors)
    return written


def _finish(partial: Path, path: Path, written: list[Written]) -> None:
    """Give the files the names by which they are looked for, and publish."""
    where = {name: held for part in written for name, held in part.items()}
    files = sorted({file for file, _ in where.values()})
    names = {file: f"model-{number:05d}-of-{len(files):05d}.safetensors" for number, file in enumerate(files, start=1)}
    if len(files) == 1:
        names = {files[0]: "model.safetensors"}
    elif files:
        total = sum(size for _, size in where.values())
        weight_map = {name: names[file] for name, (file, _) in where.items()}
        (partial / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        )
    for file, name in names.items():
        os.replace(partial / file, partial / name)
    publish_directory(partial, path)
