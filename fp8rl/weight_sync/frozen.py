"""Sends frozen weights to engines once, or lets engines read the trainer's memory. Later syncs send only adapters.

In every sync the trainer digests its frozen parameters, and an engine the weights that it serves, both in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fp8rl.models.adapters import AdapterSection
from fp8rl.models.checkpoint.peft import digest_of_all
from fp8rl.models.checkpoint.reading import starting_weights
from fp8rl.models.shared_base import SharedBase, base_bytes
from fp8rl.numerics.core.memory import Shared, mapped, share
from fp8rl.numerics.core.process import all_gathered, rank, together
from fp8rl.numerics.digest import tensor_digests
from fp8rl.numerics.quantize import NamedWeight
from fp8rl.numerics.spec import QuantSpec
from fp8rl.numerics.weight_cache import frozen_of
from fp8rl.rollout.engine.protocol import ADAPTER_SCALE
from fp8rl.weight_sync.manifest import Recorder, ShardDigests, SyncError, differences, some_of
from fp8rl.weight_sync.served import served_tensors, would_send

if TYPE_CHECKING:
    from fp8rl.trainer.scorer import Scorer
    from fp8rl.trainer.trainer import Trainer

Contents = Literal["weights", "adapters", "weights and adapters", "adapters beside a base"]
"""The part of the model that a sync sends. `weights`: the served weights, with adapters merged into them if there are
adapters. `adapters beside a base`: adapters, and the weights that are not in the shared memory of `place_base`."""
_NAMED = 20


@dataclass
class FrozenBase:
    """The frozen weights that engines hold in addition to adapters."""

    sent: ShardDigests | None = None
    """The digests of the frozen weights; None before the first sync."""
    version: int | None = None
    """The weight version of all engines that hold the base; None: unknown."""

    def contents(self, held: int | None) -> Contents:
        """Choose what to send to engines that all hold version `held` (None: no common version)."""
        known = self.sent is not None and held is not None and held == self.version
        return "adapters" if known else "weights and adapters"

    def completed(
        self, parts: Sequence[ShardDigests], adapter: AdapterSection, contents: Contents
    ) -> list[ShardDigests]:
        """Return the digests that engines must have after this sync: of the sent tensors, of the base, and of the
        adapters' scale. Raises SyncError: the base differs from the base of the first sync."""
        scale = scale_of(adapter)
        if contents == "adapters":
            assert self.sent is not None
            return [*parts, self.sent, scale]
        digests = {n: digest for part in parts for n, digest in part.digests.items() if n not in part.adapters}
        size = sum(part.weight_bytes - part.adapter_bytes for part in parts)
        self.sent = self.sent or ShardDigests(digests, size, 0)
        _compare(self.sent.digests, digests, "the sent weights")
        return [*parts, scale]

    def base_note(self, names: Sequence[str]) -> str:
        """Return a note for an error message: how many of the tensors belong to the base. If none does, return no
        text."""
        of_base = sum(name in self.sent.digests for name in names) if self.sent is not None else 0
        return f" ({of_base} of the base, which changed in the engine during the run)" if of_base else ""


def exported(trainer: Trainer, contents: Contents, stacked: bool = True) -> Iterator[NamedWeight]:
    """Yield the (HF name, tensor) pairs that this rank sends, experts in stacks. All ranks must iterate to the end."""
    if contents == "adapters":
        return trainer.weights.adapters(trainer.model, stacked)
    weights = trainer.weights.share(trainer.model, stacked)
    if contents == "weights":
        return weights
    if contents == "adapters beside a base":
        weights = (pair for pair in weights if pair[0] not in trainer.placed.base.tensors)
    return itertools.chain(weights, trainer.weights.adapters(trainer.model, stacked))


def would_hold(trainer: Trainer, spec: QuantSpec, engine_ranks: int = 1) -> ShardDigests:
    """Return the digests, under `spec`, that an engine must have of this rank's weights and adapters."""
    adapter = trainer.definition.adapter
    if adapter is not None and adapter.mode == "merged":
        adapter = None
    weights = exported(trainer, "weights" if adapter is None else "weights and adapters")
    sent = would_send(weights, spec, trainer.definition, engine_ranks)
    return sent if adapter is None or rank() else replace(sent, digests=sent.digests | scale_of(adapter).digests)


def scale_of(adapter: AdapterSection) -> ShardDigests:
    """Return an engine's entry for the scale of its adapters. The scale is a number, not a tensor."""
    return ShardDigests({ADAPTER_SCALE: repr(adapter.scale)}, 0, 0)


def check_frozen(trainer: Trainer) -> None:
    """Check that this rank's frozen parameters have the same digests as at the first check. Raises SyncError, which
    names the parameters that differ."""
    frozen: dict[str, Tensor] = {}
    for name, parameter in trainer.model.named_parameters():
        if (codes := frozen_of(parameter)) is not None:
            frozen[f"codes of {name}"] = codes.held.data.view(torch.uint8)
            frozen[f"scales of {name}"] = codes.held.scale_inv
        elif not parameter.requires_grad:
            frozen[name] = parameter.detach()
    found = dict(zip(frozen, tensor_digests(list(frozen.values())), strict=True))
    known = trainer.last_sent.frozen
    for name, digest in found.items():
        known.setdefault(name, digest)
    _compare({name: known[name] for name in found}, found, "the trainer's frozen parameters")


def _compare(expected: dict[str, str], found: dict[str, str], what: str) -> None:
    if differing := differences(expected, found):
        raise SyncError(
            f"the base changed during the run: found {len(differing)} of {what} different from the first sync "
            f"({some_of(list(differing))}), expected none, since only adapters are trained; generation stays "
            f"paused.\nRestart the run from its last checkpoint:\n" + "\n".join(list(differing.values())[:_NAMED])
        )


# One base for both sides: the frozen quantized weights, in memory that the trainer and the engines of its machine read.
#
# The trainer's ranks write the base together, once, from the model's files, tensor by tensor. Then it is read-only, and
# all ranks and engines map it. No side has a second copy of the weights: before the base is there, trainer and engines
# have placeholders (`numerics.core.memory`). The base outlives engines; a new engine maps it again. It is verified as
# in any sync: the engine's digests of its parameters are compared with the digests of the written tensors.


@dataclass(frozen=True)
class MappedBase:
    """One trainer rank's view of a base."""

    base: SharedBase
    """The tensors that the rank reads."""
    memory: Shared | None
    """The shared memory of the base on rank 0, which owns it; None on other ranks."""
    sent: ShardDigests
    """Digests of the tensors that the rank has written."""
    unquantized: str
    """Digest of all weights before they were quantized; see `models.checkpoint.peft.base_digest`."""
    kept: int
    """Bytes of the frozen parameters that are not in the base, so that the rank has its own copy."""


def place_base(model: Scorer, spec: QuantSpec) -> ShardDigests:
    """Write a trainer's frozen weights, quantized under `spec`, to shared memory, and let the trainer read them there.
    Return the digests of the tensors that this rank has written.

    Every rank must call it, all on one machine. A second call writes nothing.

    Raises:
        OSError: a rank cannot map the memory of rank 0.
        UserError: the files have values that are not finite.
    """
    if model.placed is not None:
        return model.placed.sent
    definition, device = model.definition, next(model.model.parameters()).device
    memory = share("base", base_bytes(definition, spec), device) if rank() == 0 else None
    ranks = len(all_gathered(None))
    # An address is good for one mapping. Each rank but rank 0 maps twice: once to write, and once to compute.
    addresses = all_gathered([] if memory is None else [memory.address() for _ in range(2 * (ranks - 1))])[0]
    others = iter(addresses[2 * (rank() - 1) :])

    def view(*, writable: bool = False) -> Tensor:
        return mapped(next(others), writable=writable) if memory is None else memory.own(writable=writable)

    in_files, written = Recorder(definition.tensors), Recorder(definition.tensors)

    def write() -> None:
        base = SharedBase(view(writable=True), definition, spec)
        weights = starting_weights(model.weights.path, definition, device, rank(), ranks)
        served = served_tensors(in_files.watch(weights), spec, definition)
        for name, tensor in written.watch((name, tensor) for name, tensor in served if name in base.tensors):
            base.tensors[name].copy_(tensor)

    together(write)
    together(lambda: None if memory is None else memory.seal())
    base = SharedBase(view(), definition, spec)
    unquantized = {name: digest for part in all_gathered(in_files.sent().digests) for name, digest in part.items()}
    model.placed = MappedBase(base, memory, written.sent(0), digest_of_all(unquantized), model.adopt(base))
    return model.placed.sent


def reads(model: Scorer, spec: QuantSpec) -> bool:
    """Return True if the trainer has no base yet, or a base under `spec`."""
    return model.placed is None or model.placed.base.spec == spec


def base_addresses(model: Scorer, count: int) -> list[str]:
    """Return `count` addresses of the memory, one for each engine, on the rank that owns it. Other ranks return []."""
    memory = model.placed.memory if model.placed is not None else None
    return [] if memory is None else [memory.address() for _ in range(count)]
