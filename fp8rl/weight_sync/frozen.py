"""Frozen weights: engines get them once, or read them in the trainer's memory. Later syncs send only adapters.

In every sync each side digests its own frozen weights in place: the trainer digests its parameters, and an engine
digests the weights that it serves. They are not sent or quantized again. A digest reads memory once, at full speed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from fp8rl.models.adapters import AdapterSection
from fp8rl.models.checkpoint.peft import digest_of_all
from fp8rl.models.checkpoint.reading import starting_weights
from fp8rl.models.shared_base import SharedBase, base_bytes
from fp8rl.numerics.core.memory import Shared, mapped, share
from fp8rl.numerics.core.process import all_gathered, rank, together
from fp8rl.numerics.digest import tensor_digests
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import QuantSpec
from fp8rl.numerics.weight_cache import frozen_of
from fp8rl.rollout.engine.protocol import ADAPTER_SCALE
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.rollout.types import Endpoint
from fp8rl.weight_sync.manifest import Recorder, ShardDigests, SyncError, some_of
from fp8rl.weight_sync.served import served_tensors, would_send

if TYPE_CHECKING:
    from fp8rl.trainer.scorer import Scorer
    from fp8rl.trainer.trainer import Trainer

Contents = Literal["weights", "adapters", "weights and adapters", "adapters beside a base"]
"""The part of the model that a sync sends. `weights`: the served weights, with adapters merged into them if there are
adapters. `adapters beside a base`: adapters, and the weights that are not in the memory that engines and trainer share
(`place_base`)."""
_NAMED = 20


@dataclass
class FrozenBase:
    """The frozen weights that engines hold in addition to adapters."""

    sent: ShardDigests | None = None
    """The digests of the frozen weights, from the first sync on."""
    version: int | None = None
    """The weight version of all engines that have got the base; None: unknown."""

    def contents(self, held: int | None) -> Contents:
        """Choose what to send to engines that all hold version `held` (None: no common version)."""
        known = self.sent is not None and held is not None and held == self.version
        return "adapters" if known else "weights and adapters"

    def completed(
        self, parts: Sequence[ShardDigests], adapter: AdapterSection, contents: Contents
    ) -> list[ShardDigests]:
        """Return the digests that engines must have after this sync: the sent parts, the base, and the adapters' scale.
        Raises SyncError: the trainer has sent another base than in the first sync."""
        scale = scale_of(adapter)
        if contents == "adapters":
            assert self.sent is not None
            return [*parts, self.sent, scale]
        digests = {n: digest for part in parts for n, digest in part.digests.items() if n not in part.adapters}
        size = sum(part.weight_bytes - part.adapter_bytes for part in parts)
        self.sent = self.sent or ShardDigests(digests, size, 0)
        _compare(self.sent.digests, digests, "what the trainer sends of the weights")
        return [*parts, scale]

    def base_note(self, names: Sequence[str]) -> str:
        """Return the part of an error message that says how many mismatched tensors belong to the base, or nothing."""
        of_base = sum(name in self.sent.digests for name in names) if self.sent is not None else 0
        return f" ({of_base} of the base, which changed in the engine under the run)" if of_base else ""


def exported(trainer: Trainer, contents: Contents) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
    """Yield the (HF name, tensor) pairs of this rank's shard. All ranks must iterate to the end."""
    if contents == "weights":
        return trainer.export_weights()
    adapters = trainer.weights.adapters(trainer.model)
    if contents == "adapters beside a base":
        of_base = trainer.placed.base.tensors
        return itertools.chain((pair for pair in trainer.export_weights() if pair[0] not in of_base), adapters)
    return adapters if contents == "adapters" else itertools.chain(trainer.export_weights(), adapters)


def would_hold(trainer: Trainer, spec: QuantSpec, engine_ranks: int = 1) -> ShardDigests:
    """Return the digests that an engine with `spec` must have of this rank's part of the model, adapters included."""
    adapter = trainer.definition.adapter
    if adapter is None or adapter.mode == "merged":
        return would_send(trainer.export_weights(), spec, trainer.definition, engine_ranks)
    sent = would_send(exported(trainer, "weights and adapters"), spec, trainer.definition, engine_ranks)
    return replace(sent, digests=sent.digests | scale_of(adapter).digests) if rank() == 0 else sent


def scale_of(adapter: AdapterSection) -> ShardDigests:
    """Return the entry that an engine has for the scale of its adapters, in addition to tensors."""
    return ShardDigests({ADAPTER_SCALE: repr(adapter.scale)}, 0, 0)


def check_frozen(trainer: Trainer) -> None:
    """Check that this rank's frozen parameters have the same digests as at the first check. Raises SyncError: some
    differ. The message names these parameters."""
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
    if expected == found:
        return
    names = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    lines = (f"{name}: found {found.get(name)}, expected {expected.get(name)}" for name in names[:_NAMED])
    raise SyncError(
        f"the base changed under the run: found {len(names)} of {what} other than in the first sync "
        f"({some_of(names)}), expected all of them unchanged, since only adapters are trained; generation stays "
        f"paused.\nRestart the run from its last checkpoint:\n" + "\n".join(lines)
    )


# One base for both sides: the quantized weights of a trainer that does not change them, in memory that engines of the
# same machine read as well.
#
# The trainer's ranks write it together, once, from the model's files, tensor by tensor. From then on it is read-only:
# all ranks and every engine map it. Neither side ever holds the weights beside it: a trainer and an engine that wait
# for it have placeholders (`numerics.core.memory`). It outlives engines; a new one maps it again. The proof is that of
# any sync: the engine's digests of its parameters, wherever they lie, against those of what was written.


class Ranks(Protocol):
    """The part of a `TrainerGroup` that this module needs."""

    def apply(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function on each rank, with the rank's model first, and return the results."""


@dataclass(frozen=True)
class MappedBase:
    """What one trainer rank knows of a base."""

    base: SharedBase
    """The tensors that the rank reads."""
    memory: Shared | None
    """The shared memory of the base, on the rank that owns it; None on other ranks."""
    sent: ShardDigests
    """Digests of the tensors that the rank has written."""
    unquantized: str
    """Digest of all weights as the files have them; see `models.checkpoint.peft.base_digest`."""
    kept: int
    """Bytes of frozen parameters of which the rank still has its own copy."""


def place_base(model: Scorer, spec: QuantSpec) -> MappedBase:
    """Write a trainer's frozen weights, quantized under `spec`, to shared memory, and let the trainer read them there.

    Every rank must call it, all on one machine. A second call does nothing.

    Raises:
        OSError: a rank cannot map the memory of the first rank.
        UserError: the files have values that are not finite.
    """
    if model.placed is not None:
        return model.placed
    definition, device = model.definition, next(model.model.parameters()).device
    memory = share("base", base_bytes(definition, spec), device) if rank() == 0 else None
    ranks = len(all_gathered(None))
    # An address is good for one reader. Each rank but the owner has two: it writes by one, and computes by the other.
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
    return model.placed


def write_base(trainer: Ranks, spec: QuantSpec) -> list[ShardDigests]:
    """Let all ranks place their base, if they have not yet. Return the digests of what each rank has written."""
    return trainer.apply(_written, spec)


def give_base(trainer: Ranks, spec: QuantSpec, endpoints: Sequence[Endpoint], timeout_s: float) -> list[ShardDigests]:
    """Let engines read a trainer's base, which is placed first if necessary. The caller must commit afterwards.

    Return the digests of what each rank has written.

    Raises:
        EngineError: an engine cannot read the base, and must be replaced.
    """
    sent = write_base(trainer, spec)
    addresses = next(found for found in trainer.apply(_addresses, len(endpoints)) if found)

    async def read(endpoint: Endpoint, address: str) -> None:
        async with EngineClient(endpoint, timeout_s=timeout_s) as engine:
            await engine.map_base(address)

    async def all_of_them() -> None:
        await asyncio.gather(*(read(endpoint, to) for endpoint, to in zip(endpoints, addresses, strict=True)))

    asyncio.run(all_of_them())
    return sent


def reads(model: Scorer, spec: QuantSpec) -> bool:
    """Return True if the trainer has no base yet, or a base under `spec`."""
    return model.placed is None or model.placed.base.spec == spec


def _written(model: Scorer, spec: QuantSpec) -> ShardDigests:
    return place_base(model, spec).sent


def _addresses(model: Scorer, count: int) -> list[str]:
    """Return an address of the memory for each engine, on the rank that owns the memory; elsewhere an empty list."""
    memory = model.placed.memory if model.placed is not None else None
    return [] if memory is None else [memory.address() for _ in range(count)]
