"""The proof of a sync: one digest per tensor, taken on both sides, and what differs between them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from models.tensors import SCALE_SUFFIX
from numerics.digest import tensor_digests
from numerics.files import write_atomically
from weight_sync.shards import shards

_BATCH_BYTES = 64 << 20


class SyncError(RuntimeError):
    """The engine does not hold the trainer's weights. Generation stays paused."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What an engine must hold.

    version: the weight version, as text. spec_digest: of the spec that the tensors are quantized by.
    entries: HF name -> digest; for a quantized tensor `digest@version`, where version is that of the operand which is
        made of it for the products.
    """

    version: str
    spec_digest: str
    entries: dict[str, str]

    def differences(self, found: Mapping[str, str]) -> list[str]:
        """One line per tensor that `found` (an engine's entries) lacks, has in excess, or holds otherwise."""
        lines = []
        for name in sorted(self.mismatched(found)):
            want, have = self.entries.get(name, "no such tensor"), found.get(name, "no such tensor")
            lines.append(f"{name}: found {have}, expected {want}")
        return lines

    def mismatched(self, found: Mapping[str, str]) -> set[str]:
        """The names that `differences` lists."""
        return {name for name in self.entries.keys() | found.keys() if self.entries.get(name) != found.get(name)}

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


class Recorder:
    """Digests tensors as they stream past, and so sees exactly what is sent."""

    def __init__(self, version: str, spec_digest: str) -> None:
        self._version, self._spec_digest = version, spec_digest
        self._digests: dict[str, str] = {}
        self.bytes = 0

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same stream; each tensor is digested before it is handed on, many of them at once."""
        for batch in shards(tensors, _BATCH_BYTES):
            names, held = zip(*batch)
            self._digests.update(zip(names, tensor_digests(held)))
            self.bytes += sum(tensor.nbytes for tensor in held)
            yield from batch

    def manifest(self) -> Manifest:
        """What has been seen so far. Quantized tensors are those that came with scales."""
        quantized = {name for name in self._digests if name + SCALE_SUFFIX in self._digests}
        entries = {
            name: f"{digest}@{self._version}" if name in quantized else digest for name, digest in self._digests.items()
        }
        return Manifest(self._version, self._spec_digest, entries)
