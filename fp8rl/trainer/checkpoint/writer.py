"""Writes a checkpoint's files and reads them back, while training goes on.

megatron-core 0.16.1 forks writer processes off the trainer (filesystem_async.py:237) and spawns a manager process
(:51). The manager outlives a killed trainer, and forking a process that runs gloo and Ray threads can deadlock. So only
Megatron's plan is used here. Planning needs all ranks; writing needs no other rank and may run in a thread.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from fp8rl.numerics.core.files import publish_directory
from fp8rl.numerics.digest import tensor_digest
from fp8rl.trainer import device
from fp8rl.trainer.checkpoint.files import STATE, About, digests, partial, write_about


@dataclass(frozen=True)
class Item:
    """A tensor that a rank writes under one name, or an object that Megatron has already serialized."""

    index: MetadataIndex
    data: Tensor | io.BytesIO
    digest: str
    """The digest of the staged bytes."""


@dataclass(frozen=True)
class Written:
    """The files that a rank has written."""

    files: dict[str, tuple[int, str]]
    """(bytes, SHA-256) of each file by its path relative to the checkpoint's directory."""
    results: list[WriteResult]
    """Where each item is in its file, in Megatron's form."""


class Staged:
    """One rank's part of a checkpoint. It is in separate memory until it is written."""

    def __init__(self, path: Path, about: About, texts: dict[str, bytes], state: dict[str, Any]) -> None:
        """Plan the writes and digest the items. All ranks take part.

        state: Megatron's state dict. Its tensors are on the CPU, and nothing else writes to them. texts: more files by
        name, which rank 0 writes.
        """
        self.path, self._about = path, about
        sharded, common = save_preprocess(state)
        self._texts = {**texts, f"{STATE}/{COMMON_STATE_FNAME}": _packed(common)}
        self._plan = WritePlan()
        self._plan.async_save(sharded, partial(path) / STATE)

    def write(self) -> Written:
        """Write this rank's items, read them back from the disk, and compare them with the staged items. Raises
        OSError: the disk is full, or the items read back differ from the staged ones."""
        files, results = {}, []
        for name, items in self._plan.files.items():
            file = partial(self.path) / STATE / name
            with _explained(self.path):
                placed = _write(file, items)
            files[f"{STATE}/{name}"] = _check(self.path, file, placed, items)
            results += placed
        self._plan.files.clear()
        return Written(files, results)

    def publish(self, parts: Sequence[Written]) -> None:
        """Write the other files and rename the directory to its final name. Call this on rank 0 only, after every rank
        has written its part. Raises OSError: the disk is full."""
        folder = partial(self.path)
        with _explained(self.path):
            for name, content in self._texts.items():
                (folder / name).write_bytes(content)
            self._plan.writer.storage_meta = lambda: None  # a path and a random id: equal runs would write other bytes
            self._plan.writer.finish(self._plan.metadata, [part.results for part in parts])
            save_config(CheckpointingConfig("torch_dist", 1), str(folder / STATE))
            files = {name: found for part in parts for name, found in part.files.items()}
            others = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} - files.keys()
            write_about(folder, About(self._about.step, self._about.extra, files | digests(folder, sorted(others))))
            publish_directory(folder, self.path)


class WritePlan(TorchDistSaveShardedStrategy):
    """Takes from Megatron the plan of what this rank writes to each file. metadata: all ranks' plan, on rank 0."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        self.writer: Any = None
        self.metadata: Any = None
        self.files: dict[str, list[Item]] = {}

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> None:
        self.writer, self.metadata = writer, planned[1]
        for _, name, (objects, tensors) in writer.write_buckets:
            self.files[name] = [Item(item.index, data, _digest(data)) for item, data in (*objects, *tensors)]
        writer.write_buckets = None


def _write(file: Path, items: Sequence[Item]) -> list[WriteResult]:
    placed = []
    with file.open("wb") as stream:
        for item in items:
            packed = _packed(item.data) if isinstance(item.data, Tensor) else item.data.getvalue()
            place = _StorageInfo(file.name, stream.tell(), len(packed))
            stream.write(packed)
            placed.append(WriteResult(item.index, len(packed), place))
        stream.flush()
        os.fsync(stream.fileno())
        # So that it is read back from the disk, not from the memory that it was written from.
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return placed


def _check(path: Path, file: Path, placed: Sequence[WriteResult], items: Sequence[Item]) -> tuple[int, str]:
    """Check that every item in the file is as it was staged. Return the file's size and SHA-256."""
    whole = hashlib.sha256()
    with file.open("rb") as stream:
        for result, item in zip(placed, items, strict=True):
            packed = stream.read(result.size_in_bytes)
            whole.update(packed)
            data = io.BytesIO(packed)
            try:
                found = _digest(torch.load(data, weights_only=True) if isinstance(item.data, Tensor) else data)
            except RuntimeError:  # torch's checksums say that it is damaged
                found = ""
            if found != item.digest:
                raise OSError(
                    f"checkpoint {path}: found other bytes of {item.index.fqn} in {file.name} than were written, "
                    "expected the same bytes. Test the memory and the disk of this machine, or set run.dir to another "
                    "disk"
                )
        return stream.tell(), whole.hexdigest()


def _digest(data: Tensor | io.BytesIO) -> str:
    if isinstance(data, Tensor):
        return tensor_digest(data.to(device.current()))
    return hashlib.sha256(data.getbuffer()).hexdigest()


def _packed(value: Any) -> bytes:
    packed = io.BytesIO()
    torch.save(value, packed)
    return packed.getvalue()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an error of the disk into an OSError that names the checkpoint and the free space."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            f"checkpoint {path}: found {str(error)!r} while it was written, with {free >> 20} MiB free on the disk, "
            "expected room for it. Free some space, or set run.dir to another disk"
        ) from error
