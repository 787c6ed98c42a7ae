"""Reads the pickles that megatron-core and torch put into a checkpoint, without running the code that they name."""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint import default_planner, filesystem, metadata, planner
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException

from fp8rl.numerics.core.errors import user_error

# `.metadata` is a pickle that torch 2.13 opens with `pickle.load`, and objects among the tensors are loaded without
# `weights_only`: a folder of somebody else's would run what it likes. Only the classes below are made here.

_NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    metadata.__name__: {
        *"Metadata MetadataIndex StorageMeta TensorProperties ChunkStorageMetadata TensorStorageMetadata".split(),
        *"BytesStorageMetadata _MEM_FORMAT_ENCODING".split(),
    },
    filesystem.__name__: {"_StorageInfo"},
    planner.__name__: {*"SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData".split()},
}
"""The classes that a `.metadata` pickle may name, by module. The pickle may also name dtypes."""


@contextmanager
def safe_pickles(path: Path) -> Iterator[None]:
    """Raise `UserError` for the checkpoint at `path` if a pickle that the block reads names a forbidden class."""
    try:
        yield
    except (pickle.UnpicklingError, CheckpointException) as error:
        causes = [error] if isinstance(error, pickle.UnpicklingError) else [pair[0] for pair in error.failures.values()]
        for cause in causes:
            if isinstance(cause, pickle.UnpicklingError):
                expected = "only tensors, numbers and their places in the files, because other pickles can run code"
                remedy = "Load another checkpoint, and do not trust the source of this one."
                raise user_error(f"checkpoint {path}", str(cause).partition("\n")[0], expected, remedy) from error
        raise


def read_metadata(file: Path) -> metadata.Metadata:
    """Read the `.metadata` of a checkpoint's state. Raises UnpicklingError: it names a class that is not allowed."""
    with file.open("rb") as opened:
        try:
            found = _Unpickler(opened).load()
        except (AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError) as error:
            raise pickle.UnpicklingError(f"{type(error).__name__} in {file.name}: {error}") from error
    if not isinstance(found, metadata.Metadata):
        raise pickle.UnpicklingError(f"a {type(found).__name__} in {file.name}")
    elsewhere = [
        place for place in found.storage_data.values() if Path(place.relative_path).name != place.relative_path
    ]
    if elsewhere:
        raise pickle.UnpicklingError(f"tensors in {elsewhere[0].relative_path!r}, by {file.name}")
    return found


def metadata_of_reader(reader: filesystem.FileSystemReader, *args: Any, **kwargs: Any) -> metadata.Metadata:
    """Replace torch's `FileSystemReader.read_metadata` by `read_metadata`."""
    found = read_metadata(Path(reader._get_metadata_path(kwargs.get("rank"))))
    found.storage_meta = getattr(found, "storage_meta", None) or metadata.StorageMeta()
    found.storage_meta.load_id = reader.load_id
    return found


def load_bytes(loading: default_planner.DefaultLoadPlanner, read_item: planner.ReadItem, value: io.BytesIO) -> None:
    """Replace torch's `DefaultLoadPlanner.load_bytes` by a function that unpickles weights only."""
    found, name = torch.load(value, weights_only=True), read_item.dest_index.fqn
    if loading.flatten_state_dict:
        set_element(loading.original_state_dict, loading.mappings[name], found)
    else:
        loading.state_dict[name] = found


def load_common(strategy: Any, checkpoint_dir: str | Path) -> Any:
    """Replace Megatron's `TorchCommonLoadStrategy.load_common` by a function that always unpickles weights only."""
    return torch.load(Path(checkpoint_dir) / COMMON_STATE_FNAME, map_location="cpu", weights_only=True)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"a pickle that names {module}.{name}")


def _member(kind: Any, name: str) -> enum.Enum:
    """Return a member of an enumeration. Some releases of Python 3.11 pickle a member as an attribute of its class."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"a pickle that names the attribute {name} of {kind}")
