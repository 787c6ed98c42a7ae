"""One base for both sides: the quantized weights of a trainer that does not change them, in memory that engines of the
same machine read as well.

The trainer's ranks write it together, once, and from then on nobody does: all of them and every engine map it to be
read. It outlives engines; a new one maps it again. The proof is that of any sync: the engine's digests of its
parameters, wherever they lie, against those of what was written.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from models.base import Base, base_bytes
from numerics.holdings import give_back
from numerics.io.shared import mapped, share
from numerics.ranks import all_gathered, rank, together
from numerics.spec import QuantSpec
from rollout.server.client import EngineClient
from rollout.types import Endpoint
from weight_sync.manifest import Recorder, Sent
from weight_sync.quantized import served_tensors

if TYPE_CHECKING:
    from trainer.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Placed:
    """What one trainer rank knows of the base that it has written with the others.

    Attributes:
        sent: digests of what the rank has written.
        bytes: of the base. kept: of this rank's frozen parameters that it still has for itself.
    """

    sent: Sent
    bytes: int
    kept: int


def place_base(trainer: Trainer, spec: QuantSpec) -> Placed:
    """Write the weights of a trainer, quantized under `spec`, into a new base, and have the trainer read them there.
    Every rank calls it, all on one machine.

    Raises:
        OSError: a rank cannot reach the memory of the first.
    """
    device, size = next(trainer.model.parameters()).device, base_bytes(trainer.definition, spec)
    memory = share("base", size, device) if rank() == 0 else None
    address = all_gathered("" if memory is None else memory.address())[0]
    recorder = Recorder(trainer.definition.tensors)

    def write() -> None:
        base = Base(mapped(address, writable=True), trainer.definition, spec)
        for name, tensor in recorder.watch(served_tensors(trainer.export_weights(), spec, trainer.definition)):
            if name in base.tensors:
                base.tensors[name].copy_(tensor)

    together(write)
    together(lambda: None if memory is None else memory.seal())
    trainer.shared_base = memory
    kept = trainer.adopt(Base(mapped(address), trainer.definition, spec))
    give_back()
    return Placed(recorder.sent(0), size, kept)


def address_of_base(trainer: Trainer) -> str | None:
    """Where the base is, for one engine; None on the ranks that do not own it."""
    return None if trainer.shared_base is None else trainer.shared_base.address()


async def map_base(engines: Sequence[EngineClient], addresses: Sequence[str]) -> None:
    """Have each engine read the base at an address of its own; `commit` follows."""
    await asyncio.gather(*(engine.map_base(to) for engine, to in zip(engines, addresses, strict=True)))


def reason_to_send(endpoints: Sequence[Endpoint], spec: QuantSpec, trained: QuantSpec, transport: str) -> str | None:
    """Why a base cannot be read by these engines where the trainer has it, and has to be sent; None: it can.

    spec: what the engines serve. trained: what the trainer computes in.
    """
    if transport != "tensor":
        return f"sync.transport is {transport}: engines do not map the trainer's memory"
    if spec != trained:
        return "the two sides do not compute in one spec"
    if spec.quantized and spec.weight.granularity != "block":
        return f"weights are quantized by {spec.weight.granularity}; only blocks lie alike on both sides"
    if ranks := max(endpoint.ranks for endpoint in endpoints) - 1:
        return f"an engine of {ranks + 1} ranks holds parts of tensors"
    return None
