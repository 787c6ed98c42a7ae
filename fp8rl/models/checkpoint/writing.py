"""Writes a Hugging Face directory, by all ranks of a trainer together or by one process."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fp8rl.models.multimodal import Piece
from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.files import publish_directory, room_for
from fp8rl.numerics.core.memory import batches_by_bytes
from fp8rl.numerics.core.process import exhaust, rank, together
from fp8rl.numerics.core.reading import check_path, open_regular, reason

# Reading safetensors files: a damaged or missing file is refused with one sentence.


def open_tensors(file: Path, key: str) -> Any:
    """Open a safetensors file, as `safe_open` does; messages call the file `key`. Raises UserError if it is missing, no
    regular file, or incomplete."""
    check_path(file, key)
    try:
        open_regular(file).close()  # at a pipe, that library would wait
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        expected = "a whole safetensors file"
        raise user_error(f"{key}: {file}", reason(error), expected, "Copy the file again.") from None


INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 4 << 30

Written = dict[str, tuple[str, int]]
"""By tensor: the name of its file, and its size in bytes."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whose bytes depend only on the arguments.

    The library itself writes the keys of metadata in the order of a hash map, which differs from process to process.
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
            raise OSError(f"{path}: found a header of {size} bytes, expected {len(written)} for these keys and values")
        file.seek(8)
        file.write(written)


WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")


def copy_beside_weights(source: Path, out: Path) -> None:
    """Copy all files of a model's directory except weights and hidden files into an existing directory."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns(*WEIGHT_FILES, ".*"), dirs_exist_ok=True)


def write_directory(
    path: Path,
    tensors: Iterable[tuple[str, Tensor]],
    describe: Callable[[Path], object],
    pieces: Mapping[str, Piece] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the files of a model: what `describe` puts into the directory, and the tensors of all ranks.

    All ranks take part. `path` appears whole or not at all, and replaces what was there. tensors: (name, tensor) of
    this rank; no two ranks have the same name. describe: called only on rank 0. pieces: by tensor, the piece of the
    files that it becomes; other tensors keep their names. dtype: the dtype of stacked tensors.

    An error on one rank is raised on all ranks.
    """
    partial = path.with_name(f".{path.name}.partial")
    first = rank() == 0
    stacks = Stacks(partial, pieces or {}, dtype)
    try:
        with room_for(path):
            together(lambda: _begin(partial, describe, stacks) if first else None)
            written = together(lambda: _write(tensors, partial, stacks))
            together(lambda: _finish(partial, path, written) if first else None)
    except BaseException:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        exhaust(tensors)


def _begin(partial: Path, describe: Callable[[Path], object], stacks: Stacks) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    describe(partial)
    stacks.allocate()


def _write(tensors: Iterable[tuple[str, Tensor]], partial: Path, stacks: Stacks) -> Written:
    written: Written = {}
    try:
        for index, shard in enumerate(batches_by_bytes(stacks.take(tensors), _SHARD_BYTES)):
            file = f"{rank():05d}-{index:05d}.safetensors"
            write_tensors(partial / file, {name: tensor.cpu().contiguous() for name, tensor in shard}, {"format": "pt"})
            written |= {name: (file, tensor.nbytes) for name, tensor in shard}
    finally:
        exhaust(tensors)
    return written | stacks.written


def _finish(partial: Path, path: Path, written: list[Written]) -> None:
    """Give the files the names that libraries expect, and publish the directory."""
    where: Written = {}
    for part in written:
        for name, (file, size) in part.items():  # several ranks may have written parts of one stacked tensor
            where[name] = file, size + where.get(name, (file, 0))[1]
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


class Stacks:
    """Writes stacked tensors of experts. Each rank writes the parts of its own experts."""

    def __init__(self, folder: Path, pieces: Mapping[str, Piece], dtype: torch.dtype) -> None:
        self._folder, self._pieces, self._dtype = folder, pieces, dtype
        self._shapes = {piece.name: piece.of for piece in pieces.values() if piece.of}
        self._files = {name: f"stacked-{number:05d}.safetensors" for number, name in enumerate(self._shapes)}
        self.written: Written = {}
        """By stacked tensor: its file, and the number of bytes that this rank has written."""

    def allocate(self) -> None:
        """Make the files in their final size, with zeros in place of the tensors."""
        for name, file in self._files.items():
            with (self._folder / file).open("wb") as made:
                header = self._header(name)
                made.write(len(header).to_bytes(8, "little") + header)
                made.truncate(made.tell() + self._bytes(name))

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Write parts of stacked tensors to their places. Yield all other tensors, with their names in the files."""
        for name, tensor in tensors:
            piece = self._pieces.get(name, Piece(name))
            if not piece.of:
                yield piece.name, tensor
                continue
            if (found := tuple(tensor.shape)) != piece.shape:
                raise ValueError(f"{piece.name}: found a part of shape {list(found)}, expected {list(piece.shape)}")
            part, file = tensor.detach().to("cpu", self._dtype).contiguous(), self._files[piece.name]
            with (self._folder / file).open("r+b") as stream:
                stream.seek(8 + len(self._header(piece.name)) + piece.start * self._dtype.itemsize)
                stream.write(part.view(torch.uint8).numpy().data)
            self.written[piece.name] = file, part.nbytes + self.written.get(piece.name, (file, 0))[1]

    def _header(self, name: str) -> bytes:
        kind = {torch.bfloat16: "BF16", torch.float32: "F32"}[self._dtype]
        tensor = {"dtype": kind, "shape": list(self._shapes[name]), "data_offsets": [0, self._bytes(name)]}
        text = json.dumps({"__metadata__": {"format": "pt"}, name: tensor}, separators=(",", ":")).encode()
        return text.ljust(-(-len(text) // 8) * 8)

    def _bytes(self, name: str) -> int:
        return math.prod(self._shapes[name]) * self._dtype.itemsize
