"""Proves a sync: trainer and engine each digest every tensor, and the digests are compared."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from fp8rl.models.architecture import Role
from fp8rl.models.tensors import SCALE_SUFFIX, EngineRank, TensorTable, base_name
from fp8rl.numerics.core.files import write_atomically
from fp8rl.numerics.core.memory import batches_by_bytes
from fp8rl.numerics.digest import stack_digests
from fp8rl.numerics.spec import QuantSpec

Labels = tuple[str, ...]
_BATCH_BYTES = 16 << 20
_NAMED = 3


def some_of(names: Sequence[str]) -> str:
    """Return the first names and the number of the others, as text for a message."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


class SyncError(RuntimeError):
    """The engine does not hold the trainer's weights. Generation stays paused."""


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str]:
    """Return a line for each tensor whose digest is missing, unknown or different in `found`, by the tensors' names."""
    names, none = sorted(expected.keys() | found.keys()), "no such tensor"
    both = ((name, found.get(name, none), expected.get(name, none)) for name in names)
    return {name: f"{name}: found {have}, expected {want}" for name, have, want in both if have != want}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The digests that an engine must hold."""

    version: str
    """The weight version, as text."""
    spec_digest: str
    """Digest of the spec that the tensors are quantized by."""
    entries: dict[str, str]
    """HF name, or label of a part (`EngineRank.label`) -> digest, in the names' order. A quantized tensor has
    `digest@version`, with the version of its GEMM operand."""
    role: Role = "policy"
    """The model whose tensors these are."""

    @classmethod
    def merged(cls, version: int, spec: QuantSpec, parts: Sequence[ShardDigests], role: Role = "policy") -> Manifest:
        """Merge what all ranks have sent into one manifest. A tensor that was sent with scales counts as quantized.

        Raises ValueError if two ranks have sent the same tensor.
        """
        digests: dict[str, str] = {}
        for part in parts:
            if twice := sorted(digests.keys() & part.digests.keys()):
                raise ValueError(f"found {', '.join(twice[:5])} sent by two ranks, expected each tensor from one")
            digests |= part.digests
        named = {label: base_name(label) for label in digests}
        quantized = {label for label, (name, part) in named.items() if name + SCALE_SUFFIX + part in digests}
        entries = {
            name: f"{digest}@{version}" if name in quantized else digest for name, digest in sorted(digests.items())
        }
        return cls(str(version), spec.digest(), entries, role)

    def differences(self, found: Mapping[str, str]) -> dict[str, str]:
        """Compare with an engine's entries, as the function `differences` does."""
        return differences(self.entries, found)

    def save(self, path: Path) -> None:
        """Write the manifest as JSON, completely or not at all."""
        write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


@dataclasses.dataclass(frozen=True)
class ShardDigests:
    """The digests and sizes of the tensors that one rank has sent."""

    digests: dict[str, str]
    """Digests by the names of `Manifest.entries`."""
    weight_bytes: int
    bytes: int
    """Bytes of the payload."""
    adapters: frozenset[str] = frozenset()
    adapter_bytes: int = 0
    """The adapters' part of `weight_bytes`."""


class Recorder:
    """Digests tensors on their way to the transport, and so digests exactly what is sent.

    table: the table of the model's tensors. ranks: number of ranks of an engine, each of which digests its own part.
    """

    def __init__(self, table: TensorTable, ranks: int = 1) -> None:
        self._table, self._ranks = table, [EngineRank(rank, ranks) for rank in range(ranks)]
        self._digests: dict[str, str] = {}
        self._bytes = self._adapter_bytes = 0
        self._adapters: set[str] = set()

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same tensors. Each is digested before it is yielded, together with others of its batch."""
        for batch in batches_by_bytes(tensors, _BATCH_BYTES):
            parts: dict[Labels, Tensor] = {}
            for name, tensor in batch:
                its_parts = self._parts(*self._table.stack(name, tensor))
                parts |= its_parts
                if (row := self._table.get(name)) is not None and row.adapts is not None:
                    self._adapters.update(*its_parts)
                    self._adapter_bytes += tensor.nbytes
            digests = stack_digests(list(parts.values()))
            self._digests.update(zip(itertools.chain.from_iterable(parts), digests, strict=True))
            self._bytes += sum(tensor.nbytes for _, tensor in batch)
            yield from batch

    def _parts(self, names: Labels, stack: Tensor) -> dict[Labels, Tensor]:
        """Return what ranks digest of a stack, by labels. They divide experts, so each part of a stack is whole."""
        if len(self._ranks) == 1 or (row := self._table[names[0]]).engine.split is None:
            return {names: stack}
        return {(rank.label(names[0], row),): rank.part(row, stack[0])[None] for rank in self._ranks}

    def sent(self, payload: int | None = None) -> ShardDigests:
        """Return the digests so far. payload: number of bytes sent, if it is not the size of the tensors."""
        sent = self._bytes if payload is None else payload
        return ShardDigests(dict(self._digests), self._bytes, sent, frozenset(self._adapters), self._adapter_bytes)
